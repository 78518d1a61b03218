"""Charts: stacked areas, flame graphs and tables as HTML pages, SVG and PNG.

All pages share one template, colours and number formats, load nothing, and follow the browser's
light or dark mode. jinja2 and matplotlib are imported when something is drawn.
"""
