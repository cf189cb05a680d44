"""The command that exports a run."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.text import Text

from windlass.cli.options import RunName, Step, WhichWeights, options, say
from windlass.errors import UserError


def export(
    ctx: typer.Context,
    run: RunName = None,
    to: Annotated[str | None, typer.Option(metavar="DIR", help="the folder to create")] = None,
    weights: WhichWeights = "last",
    step: Step = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="FORM",
            help="model, adapter, merged, own, low-bit, gguf or gguf-adapter; default: the adapter "
            "if there is one, else the model",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(metavar="TYPE", help="bfloat16, float16, float32 or as-is (of the start)"),
    ] = "as-is",
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="with --as gguf: f32, f16, bf16, q8_0, q4_0, mxfp4 or tq2_0; default: as --dtype",
        ),
    ] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="largest weight file")] = "5GB",
    license: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="licence in the model card, such as apache-2.0; default: that of the base model",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="upload to the hub as OWNER/NAME; needs `hf auth login`"),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="with --push: create a private repository")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="list files and sizes without writing")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="load with transformers or peft and compare logits"),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="overwrite an earlier export")] = False,
) -> int:
    """Export a run's model in the format that transformers, peft and vLLM load.

    A model is sharded safetensors, config.json, the tokenizer with its chat template,
    generation_config.json, and a model card, README.md, with the recipe, the losses, scores of
    tasks, the licence, the data sets and how to load it. A run with an adapter gives the adapter
    alone, as a PEFT folder, or merged into its model; --as own keeps both as they are, a quantized
    model among them, for model.path of a recipe; --as low-bit packs its codes. --as gguf writes one
    file for llama.cpp and ollama, with the tokenizer and the chat template in it, and --as
    gguf-adapter a LoRA for llama-cli --lora.
    Only the run is needed: neither an accelerator nor the model it started from. The folder appears
    when it is complete. Exits with 1 if --check finds a difference.

    windlass export quickstart --to stories
    windlass export mine --to mine-merged --as merged --dtype bfloat16 --check
    windlass export mine --to mine-gguf --as gguf --quantize q8_0
    windlass export mine --to best --weights best --push me/mine --dry-run
    """
    with ctx.obj.phase("exporting"):
        import jax

        from windlass.release.export import Options
        from windlass.release.export import export as call

        # An accelerator is not needed, and so not taken from whoever else may use it.
        jax.config.update("jax_platforms", "cpu")
        chosen = options(
            Options,
            {"form": "as"},
            weights=weights,
            step=step,
            form=form,
            dtype=dtype,
            quantize=quantize,
            shard_size=shard_size,
            license=license,
            push=push,
            private=private,
            dry_run=dry_run,
            check=check,
            force=force,
        )
        if to is None:
            raise UserError("where to? windlass export RUN --to DIR writes into a new folder DIR")
        done = call(run, to, **vars(chosen))
    for name, value in _facts(done, chosen):
        say(Text.assemble((f"{name:<8}", "bold"), value))
    return 0 if done.comparison is None or done.comparison.good else 1


def _facts(done: Any, chosen: Any) -> Iterator[tuple[str, str]]:
    """Facts of an export, a line each, or of a dry run."""
    from windlass.units import size

    longest = max(map(len, done.files))
    for name, count in done.files.items():
        yield "file", f"{name:<{longest}}  {size(count)}"
    total = f"{size(sum(done.files.values()))} in {len(done.files)} files"
    form = "merged model" if done.form == "merged" else done.form
    which = f"the {form} of step {done.step}, {chosen.weights} weights"
    if chosen.dry_run:
        yield "export", f"{which}, would be {total} in {done.folder}; nothing written"
        if chosen.push is not None:
            visibility = "private, where it is new" if chosen.private else "public, where it is new"
            yield "push", f"{done.folder} would be pushed to {chosen.push}, {visibility}"
        return
    yield "export", f"{which}: {total} in {done.folder}"
    if done.bits_per_weight is not None:
        yield "bits", f"{done.bits_per_weight:.2f} bits per weight of the linear maps"
    if done.comparison is not None:
        verdict = "the same" if done.comparison.good else "NOT the same"
        yield "check", f"{verdict}: {done.comparison}"
    if done.address is not None:
        yield "pushed", done.address
    elif chosen.push is not None:
        yield "pushed", "nothing, since the check found a difference"
    if done.form == "adapter":
        yield "next", "--as merged writes the model with the adapter in it"
    if done.form == "gguf":
        file = next(done.folder / name for name in done.files if name.endswith(".gguf"))
        yield "next", f"llama-cli -m {file} -p 'Once upon a time'"
        yield "next", f"ollama create {file.stem} -f {done.folder / 'Modelfile'}"
    elif done.form == "gguf-adapter":
        file = next(done.folder / name for name in done.files if name.endswith(".gguf"))
        yield "next", f"llama-cli -m BASE.gguf --lora {file} -p 'Once upon a time'"
    yield "next", f"{done.folder / 'README.md'} says how to load it"
