"""Charts: stacked areas, flame graphs and tables as HTML pages, SVG and PNG.

All pages share one template, colours and number formats, load nothing, and follow the browser's
light or dark mode. matplotlib is imported when a picture is drawn.
"""

from lightning_perf.charts.heatmap import heatmap_html
from lightning_perf.charts.stacked import Row, TableRow, stacked_html, stacked_png

__all__ = ["Row", "TableRow", "heatmap_html", "stacked_html", "stacked_png"]
