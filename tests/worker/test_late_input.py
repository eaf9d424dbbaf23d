"""What comes late comes for the iteration that waits, in time, or ends the worker."""

import pytest

from sipipe.errors import DamagedError, StallError
from sipipe.worker.late_input import LateInput


def test_in_order_and_of_the_right_iteration():
    late = LateInput("grammar", 0.01)
    late.put(3, "a")
    late.put(5, None)
    assert [late.take(3), late.take(5)] == ["a", None]
    late.put(7, "b")
    with pytest.raises(DamagedError, match="the grammar of iteration 7 came for 6"):
        late.take(6)


@pytest.mark.parametrize(("closed", "error"), [(False, StallError), (True, DamagedError)])
def test_a_wait_ends_in_time_or_with_the_process(closed, error):
    late = LateInput("grammar", 0.01)
    if closed:
        late.close()
    with pytest.raises(error, match="the grammar of iteration"):
        late.take(6)
