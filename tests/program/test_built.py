"""A recipe read for the devices that are here."""

import pytest

from tests.trained import recipe
from windlass.errors import UserError
from windlass.starting.describe import describe


@pytest.mark.parametrize(("count", "rows"), [(3, 5), (6, 2)])
def test_a_trained_model_is_used_on_devices_that_could_not_share_its_batch(count, rows):
    trained = recipe(device={"count": count})
    with pytest.raises(UserError, match=f"gives the 16 rows .* = {count} devices; .* would do"):
        describe(trained)
    used = describe(trained, is_trained=False)
    assert dict(used.mesh.shape) == {"data": 1, "fsdp": count, "tensor": 1}
    assert used.batches == (rows, 1, count)
