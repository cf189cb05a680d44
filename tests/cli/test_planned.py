"""Plans on a terminal and in a pipe, from made-up figures."""

import dataclasses

import pytest

from tests.planning.plans import made, without_time
from windlass.cli.best import print_bests
from windlass.cli.planned import print_plans
from windlass.planning.changes import Change, Tried
from windlass.planning.plan import Refused
from windlass.planning.search import Best
from windlass.planning.targets import find
from windlass.planning.winner import chosen

ONE = """\
target  fits     GiB per device         step  tokens/s     MFU         run     on demand         spot
v5e-8   yes     8.0–8.8 of 15.8  500 ±100 ms  131 ±26k  40 ±8%  64 ±12 min  $10.24 ±1.92  $2.56 ±0.48
h100    no    80.0–88.0 of 74.5  500 ±100 ms  131 ±26k  40 ±8%  64 ±12 min   $2.13 ±0.40            ?
v5e-4   no

v5e-8  8 × TPU v5e
  batch    64 sequences of 1,024 tokens: 8 per device × 1 accumulation × 8 shards; bfloat16, splash attention, remat saved
  mesh     data 1 × fsdp 8 × tensor 1 (in pieces)
  memory   8.0 of 15.8 GiB per device, or up to 10% more
           weights         2.0 GiB  █████▏
           activations     4.0 GiB  ██████████▏
           other           2.0 GiB  █████▏
           free            7.8 GiB  ░░░░░░░░░░░░░░░░░░░
  step     500 ±100 ms, compute-bound
           matmuls          400 ms  ████████████████████████████████
           attention        100 ms  ████████
  run      64 ±12 min; $10.24 ±1.92 on demand; $2.56 ±0.48 spot
  epoch    6.0 ±1.2 min; $0.96 ±0.19 on demand; $0.24 ±0.05 spot
  prices   $1.200 (gcp us-central1, 2999-01-01) on demand, $0.300 (gcp us-central1, 2999-01-01) spot, per chip-hour
  assumes  3m00s to start a machine, 1m00s to compile
  note     spot costs are without restarts: --preemptions 0.1 adds those of one preemption in ten hours

h100  1 × H100
  batch    64 sequences of 1,024 tokens: 64 per device × 1 accumulation × 1 shard; bfloat16, splash attention, remat saved
  mesh     data 1 × fsdp 1 × tensor 1 (in pieces)
  memory   80.0 of 74.5 GiB per device, or up to 10% more: 5.5 GiB too much
           weights        20.0 GiB  ██████████
           activations    40.0 GiB  ████████████████████
           other          20.0 GiB  ██████████
  step     500 ±100 ms, compute-bound
           matmuls          400 ms  ████████████████████████████████
           attention        100 ms  ████████
  run      64 ±12 min; $2.13 ±0.40 on demand; ? spot
  epoch    6.0 ±1.2 min; $0.20 ±0.04 on demand; ? spot
  prices   $2.000 (lambda, 2999-01-01) on demand, per chip-hour
  assumes  3m00s to start a machine, 1m00s to compile
  note     no price of h100 spot is known; `windlass prices --update FILE` takes one

v5e-4  4 × TPU v5e
it cannot be laid out
"""  # noqa: E501
SEVERAL = """\
recipe    target  fits  batch  it/s     GiB per device  tokens/s  per chip         run     on demand         spot  epoch on demand   epoch spot
mine a=1  v5e-8   yes      64  2.00    8.0–8.8 of 15.8  131 ±26k     1.00×  64 ±12 min  $10.24 ±1.92  $2.56 ±0.48      $0.96 ±0.19  $0.24 ±0.05
mine a=1  h100    no       64  2.00  80.0–88.0 of 74.5  131 ±26k     8.00×  64 ±12 min   $2.13 ±0.40            ?      $0.20 ±0.04            ?
mine a=2  v5e-8   yes      64  2.50    8.0–8.8 of 15.8  164 ±33k     1.25×  52 ±10 min   $8.32 ±1.54  $2.08 ±0.38      $0.77 ±0.15  $0.19 ±0.04
mine a=2  h100    no

the fastest that fits
recipe    target  fits  batch  it/s   GiB per device  tokens/s  per chip         run    on demand         spot  epoch on demand   epoch spot
mine a=2  v5e-8   yes      64  2.50  8.0–8.8 of 15.8  164 ±33k     1.25×  52 ±10 min  $8.32 ±1.54  $2.08 ±0.38      $0.77 ±0.15  $0.19 ±0.04

note  v5e-8: spot costs are without restarts: --preemptions 0.1 adds those of one preemption in ten hours
note  h100: no price of h100 spot is known; `windlass prices --update FILE` takes one
note  h100: mine a=2: it cannot be laid out
"""  # noqa: E501


def test_one_recipe_is_a_table_of_targets_and_what_is_behind_each(capsys):
    refused = Refused("mine", find("v5e-4"), "it cannot be laid out")
    print_plans([made("v5e-8"), made("h100", gib=80), refused])
    assert capsys.readouterr().out == ONE


def test_several_are_one_table_with_what_a_chip_does_beside_one_of_the_first_target(capsys):
    first, second = ("a=1",), ("a=2",)
    refused = Refused("mine", find("h100"), "it cannot be laid out", second)
    faster = made("v5e-8", keys=second, seconds=0.4)
    print_plans([made("v5e-8", keys=first), made("h100", gib=80, keys=first), faster, refused])
    assert capsys.readouterr().out == SEVERAL


def test_runs_that_read_different_amounts_are_compared_by_a_million_tokens(capsys):
    small, large = made("v5e-1", rows=8, seconds=0.125), made("v5e-8", rows=64, seconds=0.125)
    print_plans([small, large])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[-1].strip() == "per 1M spot"
    # As many tokens a chip-hour, and as dear, though one run costs eight times the other.
    assert [line.rpartition("min")[2].split() for line in lines[1:3]] == [
        "$0.38 ±0.06 $0.09 ±0.01 59.0M $0.0051 ±0.0010 $0.0013 ±0.0003".split(),
        "$3.04 ±0.48 $0.76 ±0.12 471.9M $0.0051 ±0.0010 $0.0013 ±0.0003".split(),
    ]
    print_plans([large, large])
    assert "per 1M" not in capsys.readouterr().out
    keys = [dataclasses.replace(small, keys=("a=1",)), dataclasses.replace(large, keys=("a=2",))]
    print_plans(keys)
    out = capsys.readouterr().out
    assert out.count("per 1M on demand") == 2  # in the table of the fastest as well


def test_saves_are_mentioned_where_they_take_time_or_decide_what_is_lost(capsys):
    for preemptions, told in ((None, False), (0.1, True)):
        print_plans([made(preemptions=preemptions)])
        assert ("a save of 0 µs every 50 s" in capsys.readouterr().out) is told


@pytest.mark.parametrize("width, count", [(80, 2), (60, 2), (50, 3)])
def test_a_narrow_terminal_breaks_tables_in_pieces_and_lines_at_words(
    capsys, monkeypatch, width, count
):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    print_plans([made("v5e-8"), made("h100")])
    lines = capsys.readouterr().out.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.startswith("target") for line in lines) == count
    assert "…" not in "".join(lines)


def test_what_is_said_of_every_target_is_said_once(capsys):
    plans = [dataclasses.replace(made(on), notes=["both", on]) for on in ("v5e-8", "v5e-1")]
    print_plans(plans)
    lines = capsys.readouterr().out.splitlines()
    notes = [line.split() for line in lines if line.strip().startswith("note")]
    assert notes == [["note", "v5e-8"], ["note", "v5e-1"], ["note", "both"]]


def test_a_note_of_some_of_several_recipes_names_them(capsys):
    notes = {"a=1": ["both", "one alone"], "a=2": ["both"]}
    print_plans([
        dataclasses.replace(made(on, keys=(key,)), notes=notes[key])
        for key in notes
        for on in ("v5e-8", "v5e-4")
    ])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("note")] == [
        "note  both",
        "note  mine a=1: one alone",
    ]


def test_a_compiler_says_what_memory_is_without_an_error(capsys):
    plan = made("v5e-8")
    print_plans([dataclasses.replace(plan, memory=plan.memory._replace(error=0.0))])
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[2:5] == ["8.0", "of", "15.8"]
    assert "  memory   8.0 of 15.8 GiB per device\n" in out


def test_chips_are_counted_as_they_are_paid_for_and_devices_where_they_are_more(capsys):
    print_plans([made("v3-8"), made("2xv6e-16")])
    lines = capsys.readouterr().out.splitlines()
    assert "v3-8  4 × TPU v3, 8 devices" in lines
    assert "2xv6e-16  32 × TPU v6e on 8 hosts" in lines


def test_a_device_whose_speed_is_not_known_has_question_marks(capsys):
    print_plans([without_time(made("v5e-8"))])
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == "v5e-8 yes 8.0–8.8 of 15.8 ? ? ? ? ? ?".split()


@pytest.mark.parametrize(
    "gib, said",
    [
        (
            20,
            "mine fits nowhere: the nearest is v6e-8, where it takes 40.0 of 31.2 GiB per device, "
            "8.8 too much",
        ),
        (
            15,
            "mine fits nowhere for certain: the nearest is v6e-8, where it takes 30.0 to 33.0 of "
            "31.2 GiB per device",
        ),
    ],
)
def test_a_recipe_that_fits_nowhere_says_by_how_much(capsys, gib, said):
    print_plans([made("v5e-8", gib=gib + 5), made("v6e-8", gib=2 * gib)])
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_changes_that_make_it_fit_are_said_with_what_they_do_to_a_step(capsys):
    plan, smaller = made("v5e-8", gib=20), made("v5e-8", gib=12, seconds=0.6)
    change = Change("train.remat=full", smaller.memory, smaller.time, "another run")
    print_plans([dataclasses.replace(plan, tried=Tried([change], None))])
    out = capsys.readouterr().out
    assert "  to fit   train.remat=full: 12.0 of 15.8 GiB, a step 20% slower; another run\n" in out
    print_plans([dataclasses.replace(plan, tried=Tried([], change))])
    nearest = "nothing that was tried would fit; the nearest is train.remat=full: 12.0 of 15.8 GiB"
    assert f"  to fit   {nearest}\n" in capsys.readouterr().out


def test_the_best_settings_of_several_recipes_are_told_under_their_names(capsys):
    one = chosen([Best(made(), made(), {}, 3)], "cheapest")
    print_bests([one, one], ["mine.yaml", "other.yaml"], [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine.yaml" and lines[1].startswith("target ")
    assert lines[lines.index("other.yaml") - 1] == ""
    print_bests([one], ["mine.yaml"], [])
    assert "mine.yaml" not in capsys.readouterr().out
