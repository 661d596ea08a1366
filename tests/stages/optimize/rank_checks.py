"""Run by test_optimize_ranks.py on each rank: the trainings of JOBS, one after the other; what the
ranks say of them is in FOLDER.

python -m tests.stages.optimize.rank_checks FOLDER JOBS
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from quiver import run_stage
from quiver.schemas.errors import ConfigError
from quiver.stages.model.forward import attention
from quiver.stages.model.forward.verify import probe_calls
from quiver.stages.optimize.trainer import Trainer

folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
Accelerator.end_training = lambda self: None  # it takes the ranks apart, which go on with the next
accelerator = Accelerator(cpu=True)
rank, size = accelerator.process_index, accelerator.num_processes
said = {}
train, step, block_attention = Trainer.train, Trainer._train_minibatch, attention.block_attention


def seen(self, *arguments):
    calls = []
    if job["name"] == "sharded":
        sequences = self.batch.sequences
        calls, _ = self.within_memory(
            self.active, sequences, lambda passes: probe_calls(self.policy, passes[0], sequences)
        )
    outcome = train(self, *arguments)
    moments = [state["exp_avg"] for state in self.optimizer.state.values() if state]
    about = {"all": self.num_trained, "mode": self.mode}
    about["probed"] = [float(states[0].norm()) for states, _ in calls]
    if job["config"].get("shard"):
        for name, tensors in {"weights": self.parameters, "moments": moments}.items():
            about[name] = sum(tensor.to_local().numel() for tensor in tensors)
    else:
        weights = {name: value.detach() for name, value in self.model.named_parameters()}
        save_file(weights, folder / f"{job['name']}.{rank}")
    said[job["name"]] = about
    return outcome


def dies(self, *arguments):
    if len(self.updates) == 3:
        raise KeyboardInterrupt
    return step(self, *arguments)


def fails(*arguments, **options):
    raise NotImplementedError


for job in jobs:
    Trainer.train = seen
    Trainer._train_minibatch = dies if job["dies"] else step
    attention.block_attention = fails if job["fails"] else block_attention
    config = {"processes": size, **job["config"]}
    if job["differs"] and rank == 1:
        config["learning_rate"] = 0.5
    try:
        ref = run_stage(
            "optimize", config, job["store"], in_process=True, into=job["into"], **job["refs"]
        )
        said.setdefault(job["name"], {})["ref"] = str(ref)
    except KeyboardInterrupt:
        said[job["name"]] = "died"
    except ConfigError as error:
        said[job["name"]] = str(error)
    accelerator.wait_for_everyone()

# each rank sends its tokens through one of the experts, of which there is one more
trainer = object.__new__(Trainer)
trainer.accelerator = accelerator
experts = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(size + 1)]
trainer.parameters = experts
for expert in experts:
    expert.grad_dtype = torch.float32
experts[rank].grad = torch.full((3,), 2.0 + rank)
trainer._sum_gradients()
said["experts"] = [
    expert.grad if expert.grad is None else expert.grad.tolist() for expert in experts
]
(folder / f"said.{size}.{rank}").write_text(json.dumps(said))
