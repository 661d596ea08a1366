"""A llama of 5,000 numbers that knows printable ASCII, a token a character: what `policy.model = "model.py:make"` names."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make(folder, seed=0, hidden=16):
    """Write the model into `folder`."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # the last two are space and line feed as byte-level tokenizers write them
    characters = [*(chr(code) for code in range(33, 127)), "\u0120", "\u010a"]
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *characters])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.add_special_tokens(SPECIALS)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIALS, strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)
    tokenizer.chat_template = CHATML
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(
        **ids,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        vocab_size=len(vocabulary),
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config = transformers.GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
