"""The optimisers. One file each; `optim.kind` in a recipe is the file's name.

A file defines `Optimizer`: a section with `build(steps) -> optax.GradientTransformation`, and
`rate(steps) -> schedule` for the report.
"""
