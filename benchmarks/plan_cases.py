"""Steps that plans are held against: models, targets and settings."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from windlass.config import load
from windlass.planning import compiler, targets

QWEN2 = dict(family="qwen2", vocab=151_936, head_dim=64, theta=1e6, tied=True)
QWEN3 = dict(family="qwen3", vocab=151_936, head_dim=128, theta=1e6, tied=True)
QWEN35 = dict(
    family="qwen3_5",
    **dict(vocab=248_320, head_dim=256, theta=1e7),
    **dict(key_heads=16, key_dim=128, value_dim=128),
)
MODELS = {
    "Qwen2.5-0.5B": QWEN2 | dict(embed=896, mlp=4864, layers=24, heads=14, kv_heads=2),
    "Qwen3-0.6B": QWEN3 | dict(embed=1024, mlp=3072, layers=28, heads=16, kv_heads=8),
    "Qwen3-1.7B": QWEN3 | dict(embed=2048, mlp=6144, layers=28, heads=16, kv_heads=8),
    "Qwen3-4B": QWEN3 | dict(embed=2560, mlp=9728, layers=36, heads=32, kv_heads=8),
    "Qwen2.5-3B": QWEN2
    | dict(embed=2048, mlp=11_008, layers=36, heads=16, kv_heads=2, head_dim=128),
    "Gemma-3-1B": dict(
        family="gemma",
        **dict(vocab=262_144, embed=1152, mlp=6912, layers=26, heads=4, kv_heads=1, head_dim=256),
        **dict(theta=1e6, local_theta=1e4, window=512),
    ),
    "Llama-3.1-8B": dict(
        family="llama",
        **dict(vocab=128_256, embed=4096, mlp=14_336, layers=32, heads=32, kv_heads=8),
        **dict(head_dim=128, theta=5e5),
    ),
    "Llama-2-7B": dict(
        family="llama",
        **dict(vocab=32_000, embed=4096, mlp=11_008, layers=32, heads=32, kv_heads=32),
        **dict(head_dim=128, theta=1e4),
    ),
    "SmolLM2-1.7B": dict(
        family="llama",
        **dict(vocab=49_152, embed=2048, mlp=8192, layers=24, heads=32, kv_heads=32),
        **dict(head_dim=64, theta=1.3e5, tied=True),
    ),
    "Qwen3-8B": QWEN3 | dict(embed=4096, mlp=12_288, layers=36, heads=32, kv_heads=8, tied=False),
    "Qwen3-30B-A3B": dict(
        family="qwen3_moe",
        **dict(vocab=151_936, embed=2048, mlp=768, layers=48, heads=32, kv_heads=4, head_dim=128),
        **dict(experts=128, experts_per_token=8, theta=1e6),
    ),
    "gpt-oss-20b": dict(
        family="gpt_oss",
        **dict(vocab=201_088, embed=2880, mlp=2880, layers=24, heads=64, kv_heads=8, head_dim=64),
        **dict(experts=32, experts_per_token=4, theta=1.5e5, window=128),
    ),
    "Qwen3.5-0.8B": QWEN35
    | dict(embed=1024, mlp=3584, layers=24, heads=8, kv_heads=2, value_heads=16, tied=True),
    "Qwen3.5-4B": QWEN35
    | dict(embed=2560, mlp=9216, layers=32, heads=16, kv_heads=4, value_heads=32, tied=True),
    "Qwen3.5-9B": QWEN35
    | dict(embed=4096, mlp=12_288, layers=32, heads=16, kv_heads=4, value_heads=32),
    "Qwen3.5-35B-A3B": QWEN35
    | dict(family="qwen3_5_moe", embed=2048, layers=40, heads=16, kv_heads=2, value_heads=32)
    | dict(mlp=512, shared_mlp=512, experts=256, experts_per_token=8),
    "164M": dict(
        family="llama",
        **dict(vocab=32_768, embed=1024, mlp=4096, layers=8, heads=8, kv_heads=8),
        **dict(head_dim=128, theta=1e4),
    ),
    "distil-small": dict(
        family="qwen3",
        **dict(vocab=1024, embed=64, mlp=192, layers=2, heads=4, kv_heads=2),
        **dict(head_dim=16, theta=1e4),
    ),
    "quickstart": dict(
        family="qwen3",
        **dict(vocab=1024, embed=128, mlp=384, layers=4, heads=4, kv_heads=2),
        **dict(head_dim=32, theta=1e4),
    ),
}


KEPT = 9  # fields of a case that its name always has


class Case(NamedTuple):
    """A step of a model on a target."""

    model: str
    on: str
    rows: int  # in a step, over all devices
    length: int = 1024
    rank: int | None = None  # of LoRA; None: all weights are trained
    dropout: float = 0.0
    mesh: tuple[int, int, int] | None = None  # data × fsdp × tensor; None: as windlass chooses
    optim: str = "adamw"
    train: tuple[tuple[str, Any], ...] = ()  # other keys of the section
    objective: str = "next_token"
    of: str | None = None  # a recipe that ships, of which is all but model, rows and steps
    residual: str = "plain"
    base: str | None = None  # of LoRA, in 4 bits: nf4 or int4
    expert: int = 1  # of the mesh

    @property
    def name(self) -> str:
        """By which its figures are kept: all but what is as usual at its end."""
        every, usual = list(self), list(Case._field_defaults.values())
        last = len(every)
        while last > KEPT and every[last - 1] == usual[last - 1 - len(every)]:
            last -= 1
        return json.dumps(every[:last])

    @property
    def settings(self) -> str:
        """What is not as usual."""
        told = [self.of] if self.of else []
        told += [f"LoRA {self.rank}"] if self.rank else []
        told += [f"{self.base} base"] if self.base else []
        told += [f"expert {self.expert}"] if self.expert > 1 else []
        told += [f"dropout {self.dropout}"] if self.dropout else []
        told += [] if self.optim == "adamw" else [self.optim]
        told += [] if self.objective == "next_token" else [self.objective]
        told += [] if self.residual == "plain" else [self.residual]
        told += [f"{name} {value}" for name, value in self.train]
        return ", ".join(told)

    @property
    def recipe(self) -> dict[str, Any]:
        """The run of the case, whose data is never read."""
        given = self.mesh and dict(zip(("data", "fsdp", "tensor"), self.mesh, strict=True))
        if given and self.expert > 1:
            given |= {"expert": self.expert}
        if self.of:
            return self._shipped(self.of) | ({"mesh": given} if given else {})
        lora = {"kind": "lora", "rank": self.rank, "dropout": self.dropout}
        data: dict[str, Any] = {"source": {"kind": "stories"}, "length": self.length}
        if self.objective == "preference":
            data |= {"source": {"kind": "example", "name": "pairs"}, "format": "pairs"}
        return {
            "model": MODELS[self.model],
            **({"mesh": given} if given else {}),
            **({"adapter": lora} if self.rank else {}),
            **(
                {"start": {"path": ".", "base": {"kind": self.base, **self._as_compiled("base")}}}
                if self.base
                else {}
            ),
            "residual": {"kind": self.residual},
            "tokenizer": {"kind": "byte"},
            "data": data,
            "objective": {"kind": self.objective},
            "optim": {"kind": self.optim, "learning_rate": 1e-3},
            "train": {"steps": compiler.STEPS, "batch": self.rows}
            | self._as_compiled("train")
            | dict(self.train),
        }

    def _as_compiled(self, section: str) -> dict[str, Any]:
        """Keys with which steps for TPUs were compiled, where a case says nothing of them."""
        if targets.find(self.on).chip.kind != "tpu":
            return {}
        return {"base": {"scales": "float32"}, "train": {"layers_per_loop": 1}}[section]

    def _shipped(self, name: str) -> dict[str, Any]:
        recipe = load(name).merged(targets.find(self.on).chip.kind)
        train = recipe["train"] | {"steps": compiler.STEPS, "batch": self.rows, **dict(self.train)}
        data = recipe["data"] | {"length": self.length}
        if "teacher" in data:
            data["teacher"] = {key: x for key, x in data["teacher"].items() if key != "model"}
        model = recipe["model"] if self.model == name else MODELS[self.model]
        others = {"tokenizer": {"kind": "byte"}, "data": data, "train": train}
        return recipe | {"model": model} | others


def case(model: str, on: str, rows: int, **how: Any) -> Case:
    own = {name: how.pop(name) for name in list(how) if name in Case._fields}
    return Case(model, on, rows, **own, train=tuple(how.items()))


HALF, SMALL, MIDDLE, THREE, EIGHT = (
    *("Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen3-1.7B", "Qwen2.5-3B", "Llama-3.1-8B"),
)
FOUR, GEMMA = "Qwen3-4B", "Gemma-3-1B"
SEVEN, SMOL = "Llama-2-7B", "SmolLM2-1.7B"  # as many heads of keys as of queries
SPARSE, OSS, DELTA, QWEN_EIGHT = "Qwen3-30B-A3B", "gpt-oss-20b", "Qwen3.5-9B", "Qwen3-8B"
STORIES = "tinystories-reservoir", "tinystories-transformer"  # models and all, as they ship
ATHENA, NASH = "athena-large", "nash-mhc-3b"
TPU = [
    case(HALF, "v6e-1", 8),
    case(HALF, "v6e-1", 16),
    case(HALF, "v6e-1", 8, remat="full"),
    case(HALF, "v6e-1", 4, remat="none"),
    case(HALF, "v6e-1", 16, accumulation=4),
    case(HALF, "v6e-1", 8, ema=0.99),
    case(HALF, "v6e-1", 8, optim="muon"),
    case(HALF, "v6e-1", 8, rank=16),
    case(HALF, "v6e-1", 8, layers_per_loop=4),
    case(HALF, "v6e-1", 32),
    case(SMALL, "v6e-1", 4, rank=8),
    case(SMALL, "v6e-1", 8, rank=8),
    case(SMALL, "v6e-1", 32),
    case(MIDDLE, "v6e-1", 4),
    case(MIDDLE, "v6e-1", 8),
    case(MIDDLE, "v6e-1", 8, rank=16),
    case(HALF, "v5e-1", 8),
    case(HALF, "v5e-1", 16),
    case(HALF, "v5e-1", 2, remat="full"),
    case("quickstart", "v5e-1", 16, length=128, remat="none", layers_per_loop=4),
    case("164M", "v5e-1", 4, length=2048),
    case(HALF, "v5e-4", 16, mesh=(1, 4, 1)),
    case(HALF, "v5e-4", 8, mesh=(4, 1, 1)),
    case(HALF, "v5e-4", 16, mesh=(2, 2, 1)),
    case(HALF, "v5e-4", 8, mesh=(2, 1, 2)),
    case(MIDDLE, "v5e-4", 8, remat="full"),
    case(MIDDLE, "v5e-4", 32),
    case(THREE, "v5e-4", 8),
    case(SMALL, "v5e-4", 8, length=2048, remat="none"),
    case(HALF, "v5e-8", 32, mesh=(1, 8, 1)),
    case(HALF, "v5e-8", 32, mesh=(2, 2, 2)),
    case(SMALL, "v5e-8", 32, accumulation=2),
    case(MIDDLE, "v5e-8", 16),
    case(MIDDLE, "v5e-8", 8, length=4096, remat="full"),
    case(THREE, "v5e-8", 8, remat="full"),
    case(EIGHT, "v5e-8", 8, rank=16),
    case(HALF, "v5e-8", 64, rank=32, dropout=0.05),
    case(HALF, "v5e-8", 64, rank=32),
    case(HALF, "v5e-8", 64, rank=32, dropout=0.05, accumulation=2),
    case(HALF, "v5e-8", 64, rank=32, dropout=0.05, remat="full"),
    case(HALF, "v5e-8", 64, rank=32, dropout=0.05, accumulation=2, remat="none"),
    case(HALF, "v6e-4", 32),
    case(SMALL, "v6e-4", 32, length=512),
    case(MIDDLE, "v6e-4", 16),
    case(THREE, "v6e-4", 8, remat="full"),
    case(EIGHT, "v6e-4", 4),
    case(HALF, "v6e-8", 32, mesh=(1, 8, 1)),
    case(SMALL, "v6e-8", 64),
    case(MIDDLE, "v6e-8", 64, remat="full"),
    case(THREE, "v6e-8", 32),
    case(THREE, "v6e-8", 128),
    case(EIGHT, "v6e-8", 16, rank=16, remat="full"),
    case(EIGHT, "v6e-8", 32, length=2048),
    case(HALF, "v5p-8", 32),
    case(THREE, "v5p-8", 32, length=2048),
    case(EIGHT, "v5p-8", 8, length=2048),
    case(EIGHT, "v5p-8", 32, length=4096, remat="full"),
    case(FOUR, "v6e-8", 8, optim="muon", remat="full"),
    case(GEMMA, "v6e-4", 32, length=2048),
    case(GEMMA, "v5e-4", 8),
    case(GEMMA, "v5e-8", 16, remat="full"),
    case(SMALL, "v5e-8", 16, optim="muon"),
    case(HALF, "v5e-8", 16, optim="muon"),
    case(EIGHT, "v6e-8", 32, remat="full"),
    case(FOUR, "v6e-8", 32, remat="full"),
    case(MIDDLE, "v6e-4", 32, remat="full"),
    case(SMALL, "v6e-1", 8, remat="full"),
    case(EIGHT, "v6e-8", 16, length=2048, rank=16, dropout=0.1),
    case(MIDDLE, "v6e-4", 32, rank=16, dropout=0.05),
    case(HALF, "v5e-8", 16, objective="preference"),
    case(SMALL, "v6e-4", 16, rank=16, objective="preference"),
    case(GEMMA, "v5e-8", 32),
    case(GEMMA, "v5e-4", 16, length=2048, remat="full"),
    case(GEMMA, "v6e-8", 16, optim="muon"),
    case(GEMMA, "v6e-1", 4, rank=16, dropout=0.05),
    case(THREE, "v6e-8", 16, optim="muon", remat="full"),
    case(MIDDLE, "v5e-4", 16, rank=8, objective="preference", remat="full"),
    case(SMALL, "v6e-4", 64, remat="full"),
    case(SMALL, "v6e-1", 32, accumulation=8, of="recovery-lora"),
    case(SMALL, "v6e-1", 32, length=128, of="qwen3-qat"),
    case(SMALL, "v5e-4", 128, accumulation=8, of="recovery-lora"),
    case(SMALL, "v6e-1", 8, remat="saved", of="distil-small"),
    *(case(of, on, 128, length=128, of=of) for of in STORIES for on in ("v6e-1", "v5e-4")),
    case(ATHENA, "v5e-8", 256, length=2048, microbatch=None, accumulation=2, of=ATHENA),
    case(NASH, "v6e-8", 32, length=2048, mesh=(2, 2, 2), of=NASH),
    case(NASH, "v6e-16", 32, length=2048, of=NASH),
    case(SMOL, "v6e-4", 16),
    case(SMOL, "v6e-4", 16, residual="mhc"),
    case(SMOL, "v5e-8", 32, remat="full"),
    case(SEVEN, "v6e-8", 8, length=2048),
    case(SEVEN, "v6e-8", 16, length=2048, rank=16),
    case(MIDDLE, "v6e-4", 16, residual="mhc"),
    case(SMALL, "v5e-8", 32, residual="mhc_lite"),
    case(GEMMA, "v6e-8", 32, residual="mhc", remat="full"),
    case(SPARSE, "v5e-16", 16, rank=16),
    case(SPARSE, "v6e-8", 16, rank=16),
    case(SPARSE, "v6e-8", 16, rank=16, mesh=(1, 2, 1), expert=4),
    case(OSS, "v6e-8", 16, rank=16),
    case(DELTA, "v6e-8", 16, remat="full"),
    case(DELTA, "v6e-8", 8, rank=16),
    case(QWEN_EIGHT, "v5e-1", 2, rank=16, base="nf4"),
    case(QWEN_EIGHT, "v5e-1", 4, length=2048, rank=16, base="int4", remat="full"),
]
# By names of benchmarks/gpu.py, which measured them, and of what they were measured beside.
MEASURED = json.loads((Path(__file__).parent / "gpu.json").read_text())


def measured(
    *,
    model: str,
    rows: int,
    length: int,
    rank: int | None,
    accumulation: int,
    base: str | None = None,
    remat: str = "saved",
) -> Case:
    """A step of benchmarks/gpu.py on the H200 that it was measured on."""
    train = {"accumulation": accumulation} if accumulation > 1 else {}
    train |= {"remat": remat} if remat != "saved" else {}
    return case(model, "h200", rows, length=length, rank=rank, base=base, **train)


TOO_LARGE = [
    case(MIDDLE, "h200", 64, remat="none"),
    case(EIGHT, "h200", 2),
    case(THREE, "h200", 96),
]
GPU = [
    *(measured(**next(iter(sides.values()))["case"]) for sides in MEASURED.values()),
    *TOO_LARGE,
]
# The run of legal-cot-sft, beside which others of the list only compute the same otherwise.
SAME = case(HALF, "v5e-8", 64, rank=32, dropout=0.05)
