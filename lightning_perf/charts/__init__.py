"""Pictures of where the time of a run went.

Only matplotlib and jinja2 are needed here, and imported when a picture is drawn: no trainer, no
tracking server and no torch is known.
"""

from lightning_perf.charts.page import stacked_html
from lightning_perf.charts.picture import stacked_png
from lightning_perf.charts.stacked import Row, TableRow

__all__ = ["Row", "TableRow", "stacked_html", "stacked_png"]
