"""The programs of a run on its mesh."""

import jax

from tests.trained import recipe
from windlass.program.built import Built
from windlass.program.programs import Programs
from windlass.starting.describe import describe


def test_each_device_makes_its_own_pieces_of_the_weights_and_no_more():
    words = {"vocab": 16_384, "layers": 1}
    described = describe(recipe(model=words, device={"count": 8}, mesh={"fsdp": 8}))
    with described.scope():
        programs = Programs(Built(described), 1)
        memory = (
            programs.make_init().lower(jax.random.key(0), {}, {}, None).compile().memory_analysis()
        )
    whole = 4 * programs.built.trainable.total
    assert memory is not None
    # Its pieces of the weights and two moments, and what it takes to make the random bits of them.
    assert memory.output_size_in_bytes < 0.4 * whole
    assert memory.temp_size_in_bytes < 0.5 * whole
