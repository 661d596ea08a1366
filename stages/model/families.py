"""Families of language models: which train, how their rollouts may be packed, and rules on configs.

`families.toml` lists the model types that were tried. A model goes by its own type and its text
part's; if neither was tried, it runs one rollout at a time.

Not of the spine: a table of names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.model.folder import PROCESSOR_FILES, load_errors, parse_object

if TYPE_CHECKING:
    from transformers import ProcessorMixin

MODES = ("shared", "packed", "single")
"""Ways of packing, the fastest first; forward/attention.py explains them."""
TABLE = Path(__file__).with_suffix(".toml")
FAMILIES = {
    model_type: (group["mode"], group["reason"])
    for group in tomllib.loads(TABLE.read_text()).get("group", ())
    for model_type in group["types"]
}
"""For each `model_type` that was tried: the fastest correct mode, or `refused`; and the reason why
it is not a faster one. A type of which models with sliding windows need a slower mode has a second
row for these, `TYPE with windows`."""
UNPADDED = {"deepseek_v4", "git", "llama4", "llama4_text", "minimax_m3_vl_text", "trocr"}
"""Families in which padding before a prompt changes the numbers after it, despite the mask. All
prompts of one batch must then have the same length."""
THREE_AXES = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
"""Families that give pictures positions of three axes as forward/axes.py counts them."""
OTHER_AXES = {
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
    "ernie4_5_vl_moe",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_image",
    "glm_ocr",
    "hunyuan_vl",
    "minicpmv4_7",
    "neomme",
    "paddleocr_vl",
    "qwen2_5_omni",
    "qwen3_omni_moe",
    "qwen3_omni_moe_thinker",
    "qwen4_exp",
}
"""Families whose positions of pictures have several axes too, and were not tried."""
HEARING = {"glmasr", "qwen2_audio"}
"""Families that read clips."""
NOT_SAMPLED = {"hrm_text", "moshi", "rwkv", "xlstm"}
"""Families whose code in transformers gives wrong numbers, or fails, when it reads a row id by id.
Engine `transformers` refuses them."""


def types_of(config: Any) -> set[str]:
    """Return the `model_type` of a loaded config and of its text part."""
    return {config.model_type, config.get_text_config().model_type}


def fastest_mode(config: Any) -> tuple[str, str]:
    """Return the fastest mode that suits a loaded config, and why it is not a faster one.

    An encoder-decoder model has no positions that packing could change.
    """
    if not config.is_encoder_decoder and depends_on_length(config):
        return "single", "the model's positions depend on the length of the row"
    names = types_of(config)
    text = config.get_text_config()
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        names |= {f"{name} with windows" for name in names}
    tried = [FAMILIES[name] for name in names & FAMILIES.keys()]
    if not tried:
        return "single", f"models of type {printable(config.model_type)} have not been tested"
    # a refused type that arrives here says of itself that it is a decoder
    modes = [("single", reason) if mode == "refused" else (mode, reason) for mode, reason in tried]
    return max(modes, key=lambda row: MODES.index(row[0]))


def depends_on_length(config: Any) -> bool:
    """True if rotary frequencies change with the row's length, as with `dynamic` and `longrope`;
    packing makes rows longer."""
    kinds = [rope.get("rope_type") for rope in _rotations(config)]
    return "dynamic" in kinds or "longrope" in kinds


def most_tokens_alike(config: Any) -> int | None:
    """Return the most tokens of a row that `longrope` treats like every shorter row.

    Returns None if there is no such limit. `dynamic` changes only beyond the context's end, which
    no row reaches.
    """
    limits = [
        rope.get("original_max_position_embeddings")
        for rope in _rotations(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min(filter(None, limits), default=None)


def _rotations(config: Any) -> list[dict[str, Any]]:
    """Return the rotary parameters: one set for all layers, or one for each kind of layer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [rope for rope in [parameters, *parameters.values()] if isinstance(rope, dict)]


def modalities_of(config: dict[str, Any]) -> list[str]:
    """Return what a model with this config.json reads besides text."""
    sees = isinstance(config.get("vision_config"), dict)
    return ["image"] * sees + ["audio"] * (config.get("model_type") in HEARING)


def loader_of(config: dict[str, Any], media: Sequence[str]) -> Any:
    """Return transformers' Auto class for a model with this config.json.

    Args:
        media: What the model is to read besides text, of `modalities_of`.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    model_type = config.get("model_type")
    if config.get("is_encoder_decoder"):
        return transformers.AutoModelForSeq2SeqLM
    # some models of text alone (mistral4) are listed only among models that see
    has_no_text_class = (
        model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        and model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    if media or has_no_text_class:
        return transformers.AutoModelForMultimodalLM
    return transformers.AutoModelForCausalLM


def require_processor(folder: Path, name: str) -> None:
    """Raise ConfigError if the model reads media and its processor cannot be loaded here.

    Many processors need torchvision.
    """
    if any((folder / file).is_file() for file in PROCESSOR_FILES):
        load_folders_processor(folder, name)


def load_folders_processor(folder: Path, name: str) -> ProcessorMixin | GridProcessor:
    """Return the processor of a model directory. Raises ConfigError about model `name`."""
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer

    title = f"model {name}"
    config = parse_object((folder / "config.json").read_bytes()) or {}
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        with load_errors(title):
            if config.get("model_type") in THREE_AXES:
                image_processor = AutoImageProcessor.from_pretrained(folder, **options)
                _require_patches(image_processor, config.get("vision_config") or {}, title)
                return GridProcessor(
                    image_processor,
                    AutoTokenizer.from_pretrained(folder, **options),
                    config["image_token_id"],
                )
            return AutoProcessor.from_pretrained(folder, **options)
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError):
            problem = printable(" ".join(str(error.__cause__).split()))
            next = "install what it needs, or take a model whose processor works without"
            raise ConfigError(title, f"its processor: {problem}", next=next) from None
        raise


def _require_patches(image_processor: Any, vision: Mapping[str, Any], title: str) -> None:
    """Raise ConfigError if the processor cuts pictures into other patches than the model reads."""
    names = {"merge_size": "spatial_merge_size"}
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        of_model = names.get(name, name)
        size, expected = getattr(image_processor, name), vision.get(of_model)
        if expected not in (None, size):
            raise ConfigError(
                title,
                f"preprocessor_config.json has {name} {size}, and config.json "
                f"vision_config.{of_model} {printable(expected)}",
                next="take both files from the same model",
            )


class GridProcessor:
    """The processor of a family of `THREE_AXES`, for pictures only.

    Transformers' own wants torchvision, for videos. A picture's ids are the picture's token, once
    for each feature.
    """

    def __init__(self, image_processor: Any, tokenizer: Any, image_token_id: int) -> None:
        self.tokenizer = tokenizer
        self.image_token = tokenizer.convert_ids_to_tokens(image_token_id)
        self._image_processor = image_processor
        self._image_token_id = image_token_id

    def __call__(self, images: list[list[Any]], **options: Any) -> dict[str, Any]:
        """Return the pixels and the ids of the pictures of one row."""
        pixels = self._image_processor(images=images[0], return_tensors=options["return_tensors"])
        num_patches = pixels["image_grid_thw"].prod(-1).sum()
        num_features = int(num_patches) // self._image_processor.merge_size**2
        return {"input_ids": [[self._image_token_id] * num_features], **pixels}


_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForRewardModel")


def classifier_in(config: Mapping[str, Any]) -> str | None:
    """Return the class that a config.json names, if it is a classifier's."""
    names = map(str, config.get("architectures") or ())
    return next((name for name in names if name.endswith(_CLASSIFIERS)), None)


def require_language_model(config: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError if a config.json is a classifier's. A store may hold one, for a critic or
    rewards, but no run can start from it."""
    classifier = classifier_in(config)
    if classifier:
        raise ConfigError(
            f"model {name}",
            f"is a classifier, {printable(classifier)}, and a policy writes tokens",
            next="name a causal language model; a classifier can be named in reward.models or "
            "optimize.critic_from",
        )


def require_trainable(folder: Path, name: str) -> None:
    """Raise ConfigError if models of this type cannot be trained.

    Checked at import, before rollouts are paid for. A refused type whose config.json says
    `is_decoder` is tried on its first rollouts, as are types that are not in the table.
    """
    about = parse_object((folder / "config.json").read_bytes()) or {}
    model_type = str(about.get("model_type"))
    mode, reason = FAMILIES.get(model_type, ("", ""))
    # a config without model_type is left to the loader, whose error is clearer
    if mode in MODES or model_type == "None":
        return
    if not mode:
        from transformers.models.auto import modeling_auto

        known = (
            modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )
        if any(model_type in names for names in known):
            return
        reason = f"transformers has no text model of type {printable(model_type)}"
    elif about.get("is_decoder"):
        return
    raise ConfigError(
        f"model {name}",
        f"cannot be trained: {reason}",
        next="name a causal language model, or set is_decoder = true in its config.json if it was "
        "trained so",
    )
