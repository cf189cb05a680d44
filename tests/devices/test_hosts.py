"""A process that is alone speaks to itself."""

from windlass.devices import hosts


def test_a_single_process_speaks_to_itself_without_any_service():
    hosts.barrier("a test")
    assert (hosts.count(), hosts.index(), hosts.is_first(), hosts.joined()) == (1, 0, True, None)
    assert hosts.told("a test", "a word") == "a word"
    assert hosts.each("a test", "a word") == ["a word"]
