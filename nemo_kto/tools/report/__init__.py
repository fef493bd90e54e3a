"""The page about a run, or a comparison of several.

Functions of the core that the tool uses: ``read_run``, whose ``RunRecord`` has all that the folder of a run contains;
``plots_of``, ``series_of``, ``draw_curves`` and ``style_axes`` of records/plots.py; and the texts of utils/text.py. The core
asks the tool for one thing: ``report_page.write_report``, at the end of a run.
"""
