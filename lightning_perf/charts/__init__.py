"""Charts of where the time of a run went.

matplotlib and jinja2 are imported when a chart is drawn. No torch, no Lightning.
"""

from lightning_perf.charts.page import stacked_html
from lightning_perf.charts.picture import stacked_png
from lightning_perf.charts.stacked import Row, TableRow

__all__ = ["Row", "TableRow", "stacked_html", "stacked_png"]
