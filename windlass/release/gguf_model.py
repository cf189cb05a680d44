"""A run's model as llama.cpp has it: architecture, hyperparameters, and tensors under its names."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from windlass.adapters.lora import Adapter as LoraSection
from windlass.config import listing
from windlass.config.reading import report
from windlass.data.vocabulary import Vocabulary
from windlass.errors import UserError
from windlass.evaluation.finished_run import FinishedRun
from windlass.hub import config as configs
from windlass.hub import fused, peft, weights
from windlass.hub.names import arrays
from windlass.hub.shards import ShardTensor
from windlass.layers.linear import LinearMap
from windlass.layers.rotary import FAST, Rotary, interleaved
from windlass.models import HuggingFace
from windlass.release import gguf_file, gguf_tokenizer, gguf_types, merge
from windlass.release.gguf_file import GgufFile, GgufTensor
from windlass.release.gguf_types import Quantization

SUFFIXES = (".weight", ".bias")
TURNED = (".q_proj", ".k_proj")  # whose rows llama.cpp has as interleaved pairs, in llama
WITHOUT_WINDOW = ("llama", "phi3")  # architectures that llama.cpp computes with none
ENDS = ("token_embd.weight", "output.weight")
FACTORS = "rope_freqs.weight"
LARGE_GEMMA = 62  # layers of the one that divides attention scores by another width


def architecture(source: FinishedRun) -> str:
    """The architecture of llama.cpp that computes a run's model, or a refusal."""
    name = family(source)
    table = configs.families().get(name)
    if table is None or table.gguf is None or not source.has_hugging_face_form:
        known = listing([one for one, its in configs.families().items() if its.gguf], "and")
        what = name if source.run.residual.is_plain else f"{name} with another residual"
        raise UserError(
            f"no GGUF file can be made of {what}; there are those of {known}. Without --as, the "
            "files are ones that Windlass reads"
        )
    if source.run.objective.scores:
        raise UserError(
            f"{source.folder} is a reward model, whose head llama.cpp has no name for; without "
            "--as gguf, the files are ones that transformers reads"
        )
    if found := problems(source.run.model, table):
        raise UserError(report(found, f"{source.folder}, as a GGUF file"))
    return table.gguf


def whole(
    source: FinishedRun, model: Any, name: str, quantization: Quantization, length: int
) -> GgufFile:
    """A model, with what adapters changed merged into it; an abstract one has the same size."""
    kind = architecture(source)
    rule, grids = gguf_types.RULES[quantization], on_grids(source)
    named = _namer(source)
    tensors = []
    for tensor in merge.tensors(model, source.names):
        its_name = named(tensor.name)
        grid = grids.get(tensor.name)
        wanted = grid or (rule.ends if its_name in ENDS else rule.maps)
        fits = "F32" if len(tensor.shape) == 1 else gguf_types.fitting(wanted, tensor.shape)
        read = partial(_outward, tensor, source, kind)
        tensors.append(GgufTensor(its_name, tensor.shape, fits, read, on_grid=grid == fits))
    tensors += _factors(source.run.model)

    def describe(writer: Any) -> None:
        writer.add_type("model")
        writer.add_name(name)
        _add_sizes(writer, source.run.model, kind, length)
        kinds = [tensor.kind for tensor in tensors if gguf_file.is_map(tensor)]
        _add_types(writer, max(set(kinds), key=kinds.count))
        if source.vocabulary is None:
            writer.add_tokenizer_model("none")
        else:
            gguf_tokenizer.describe(writer, source.vocabulary, source.run.model.vocab)

    return gguf_file.made(f"{name}.gguf", kind, describe, tensors)


def adapter(source: FinishedRun, model: Any, name: str, dtype: str) -> GgufFile:
    """A LoRA beside its model, as llama.cpp adds it with --lora."""
    kind, named = architecture(source), _namer(source)
    (settings,) = source.run.adapter
    assert isinstance(settings, LoraSection)
    own = weights.tensors(peft.own(model), peft.names(model, settings, source.names))
    tensors = []
    for tensor in own:
        base, part = _of_map(tensor.name)
        # Only what B writes is in the order of a map's rows; A reads as the map does.
        read = tensor.read
        if part == "lora_b":
            read = partial(_outward, tensor._replace(name=base), source, kind)
        type_name = gguf_types.RULES[gguf_types.OF_DTYPE[dtype]].maps
        tensors.append(GgufTensor(f"{named(base)}.{part}", tensor.shape, type_name, read))

    def describe(writer: Any) -> None:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        # llama.cpp scales by alpha / rank, rsLoRA by alpha / sqrt(rank).
        writer.add_float32("adapter.lora.alpha", settings.scale * settings.rank)
        writer.add_name(name)
        _add_types(writer, tensors[0].kind)

    return gguf_file.made(f"{name}.gguf", kind, describe, tensors)


def read_back(source: FinishedRun, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of a file, by name there, as Hugging Face has them."""
    kind, named = architecture(source), _namer(source)
    found = {}
    for array in arrays(merge.abstract(source.abstract), source.names):
        for name in map(fused.whole, array.names()):
            found[name] = _inward(tensors[named(name)], name, source, kind)
    return found


def on_grids(source: FinishedRun) -> dict[str, str]:
    """GGML types, by tensor, of the maps that an adapter has put on the grid of one.

    Of several adapters the last that changed a map counts: one that is merged leaves the grid.
    """
    last: dict[str, str | None] = {}
    stages = source.built.stages
    for section, before, after in zip(source.run.adapter, stages[:-1], stages[1:], strict=True):
        old = _maps(before)
        for path, node in _maps(after).items():
            if jax.tree.structure(node) != jax.tree.structure(old.get(path)):
                last[path] = section.gguf
    own: dict[str, str | None] = {}
    for array in arrays(merge.abstract(source.abstract), source.names):
        owner, _, field = array.path.rpartition(".")
        own |= dict.fromkeys(array.names(), last.get(owner) if field == "weight" else None)
    grids = {name: {own[part] for part in parts} for name, parts in fused.groups(own).items()}
    # A tensor of several maps is on a grid if all of them are.
    return {name: grid for name, (grid, *others) in grids.items() if grid and not others}


def modelfile(file: str, vocabulary: Vocabulary | None) -> str:
    """The Modelfile that `ollama create` reads beside a GGUF file."""
    lines = [f"FROM ./{file}"]
    if vocabulary is not None:
        ends = [vocabulary.name(number) for number in sorted(vocabulary.stops)]
        lines += [f'PARAMETER stop "{end}"' for end in ends]
    if vocabulary is None or vocabulary.template is None:
        lines.append("TEMPLATE {{ .Prompt }}")
    return "\n".join(lines) + "\n"


def problems(config: Any, table: HuggingFace) -> list[tuple[str, str]]:
    """Settings of a family's section that its architecture in llama.cpp has no key for."""
    found, scaling = [], getattr(config, "scaling", None)
    if scaling is not None and scaling.kind == "llama3" and table.gguf != "llama":
        found.append(
            ("model.scaling.kind", f"is llama3; llama.cpp has that in llama, not in {table.gguf}")
        )
    if scaling is not None and scaling.kind == "yarn":
        slow, fast = scaling.bounds
        if (slow, fast) != (1.0, FAST["yarn"]) or scaling.truncate is False:
            what = "llama.cpp has YaRN from 1 to 32 turns, at whole pairs (truncate)"
            found.append(("model.scaling", f"has slow {slow:g} and fast {fast:g}; {what}"))
    if table.gguf == "qwen3" and config.attention_bias:
        found.append(("model.attention_bias", "is true; qwen3 has no biases in llama.cpp"))
    if table.gguf == "phi3" and config.heads * config.head_dim != config.embed:
        what = f"llama.cpp has phi3 with heads of embed / heads, {config.embed / config.heads:g}"
        found.append(("model.head_dim", f"is {config.head_dim}; {what}"))
    if (width := getattr(config, "query_width", None)) is not None:
        known = config.embed // config.heads if config.layers == LARGE_GEMMA else config.head_dim
        if width != known:
            what = f"attention scores are divided by the square root of {known} in llama.cpp"
            found.append(("model.query_width", f"is {width}; {what}"))
    return found


def _add_sizes(writer: Any, config: Any, kind: str, length: int) -> None:
    window = getattr(config, "window", None)
    if kind in WITHOUT_WINDOW and window is not None:
        length = min(length, window)  # up to which they are the same
    writer.add_context_length(length)
    writer.add_embedding_length(config.embed)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.mlp)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.eps)
    writer.add_vocab_size(config.vocab)
    share = getattr(config, "rotary_share", 1.0)
    writer.add_rope_dimension_count(Rotary(config.theta, share=share).rotated(config.head_dim))
    writer.add_rope_freq_base(config.theta)
    if kind == "phi3":
        writer.add_sliding_window(window or 0)  # without the key it would be that of Phi-3
    if kind == "gemma3":
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern(config.global_every)
        writer.add_rope_freq_base_swa(config.local_theta)
    _add_scaling(writer, getattr(config, "scaling", None))


def _add_scaling(writer: Any, scaling: Any) -> None:
    from gguf import RopeScalingType

    if scaling is None or scaling.kind == "llama3":  # whose factors are a tensor
        return
    writer.add_rope_scaling_type(RopeScalingType(scaling.kind))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling.original_length)
        if scaling.attention_factor is not None:
            # Beside the usual factor, which llama.cpp multiplies by itself.
            usual = 0.1 * math.log(scaling.factor) + 1
            writer.add_rope_scaling_attn_factors(scaling.attention_factor / usual)


def _add_types(writer: Any, most: str) -> None:
    from gguf import GGML_QUANT_VERSION, LlamaFileType

    writer.add_file_type(LlamaFileType[gguf_types.FILE_TYPES[most]])
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _factors(config: Any) -> list[GgufTensor]:
    """The factors of Llama 3's RoPE scaling: by each, the frequency of a pair is divided."""
    scaling = getattr(config, "scaling", None)
    if scaling is None or scaling.kind != "llama3":
        return []
    plain = Rotary(config.theta).frequencies(config.head_dim)
    scaled = Rotary(config.theta, scaling=scaling).frequencies(config.head_dim)
    factors = (plain / scaled).astype(np.float32)
    return [GgufTensor(FACTORS, factors.shape, "F32", lambda: factors)]


def _namer(source: FinishedRun) -> Callable[[str], str]:
    """From a Hugging Face name to llama.cpp's."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = architecture(source)
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == kind)
    table = get_tensor_name_map(number, source.run.model.layers)

    def named(name: str) -> str:
        found = table.get_name(name, try_suffixes=SUFFIXES)
        if found is None:
            raise ValueError(f"{kind} of llama.cpp has no name for {name}")
        return found

    return named


def _outward(tensor: ShardTensor, source: FinishedRun, kind: str) -> np.ndarray:
    """A tensor as llama.cpp has it."""
    x = tensor.read().astype(np.float32)
    if kind == "gemma3" and tensor.name.endswith("norm.weight"):
        return x + 1  # its norms are kept as their distance from 1 elsewhere
    return x[_rows(tensor.name, len(x), source, kind)]


def _inward(x: np.ndarray, name: str, source: FinishedRun, kind: str) -> np.ndarray:
    if kind == "gemma3" and name.endswith("norm.weight"):
        return x - 1
    return x[np.argsort(_rows(name, len(x), source, kind))]


def _rows(name: str, count: int, source: FinishedRun, kind: str) -> np.ndarray:
    """Order of a tensor's rows: in llama, queries and keys are interleaved pairs, head by head."""
    rows = np.arange(count)
    if kind != "llama" or not name.removesuffix(".weight").removesuffix(".bias").endswith(TURNED):
        return rows
    return interleaved(rows.reshape(-1, source.run.model.head_dim)).reshape(-1)


def _of_map(name: str) -> tuple[str, str]:
    """From PEFT's name of a part to the name of the map's weight and llama.cpp's of the part."""
    module, _, part = name.removeprefix(peft.BEFORE).removesuffix(".weight").rpartition(".")
    return f"{module}.weight", part.lower()


def _maps(model: Any) -> dict[str, Any]:
    is_map = lambda node: isinstance(node, LinearMap)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_map)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): node
        for path, node in leaves
        if is_map(node)
    }


def family(source: FinishedRun) -> str:
    return type(source.run.model).__module__.rpartition(".")[2]
