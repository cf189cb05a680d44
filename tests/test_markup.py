"""HTML of what calls return holds no markup and no control code of anybody else."""

from windlass import markup
from windlass.api.notebook import is_notebook, plot


def test_texts_are_escaped_in_tables_of_both_kinds():
    harmful = "<b>\x1b[2J&"
    assert markup.facts([(harmful, harmful)]).count("&lt;b&gt;\ufffd[2J&amp;") == 2
    assert markup.table([harmful], [[harmful]]).count("&lt;b&gt;\ufffd[2J&amp;") == 2


def test_a_page_stays_in_its_frame():
    frame = markup.frame('<p class="x">a</p></iframe><script>')
    assert frame.count("<") == 2  # of the frame itself
    assert 'sandbox="allow-scripts"' in frame


def test_a_plot_has_a_line_for_each_curve_that_has_points_and_leaves_out_what_is_not_finite():
    losses = [(1, 3.0), (2, float("nan")), (3, 2.0)]
    page = plot({"loss": losses, "validation loss": []}, "step 3 of 9 <")
    assert page.count("<polyline") == 1 and 'points="0.0,0.0 1000.0,1000.0"' in page
    assert "step 3 of 9 &lt;" in page and "nan" not in page
    assert plot({"loss": losses, "validation loss": [(3, 2.5)]}, "").count("<polyline") == 2
    assert "<svg" not in plot({"loss": [], "validation loss": []}, "")


def test_a_process_without_a_kernel_is_no_notebook():
    assert not is_notebook()
