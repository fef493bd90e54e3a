"""The page about a run, or a comparison of several.

Functions of the core that the tool uses: ``read_run``, whose ``RunRecord`` has all that the folder of a run contains;
``plots_of``, ``series_of``, ``draw_curves`` and ``style_axes`` of records/plots.py; and the texts of utils/text.py. At the
end of a run, the command line asks the tool for ``report_page.write_report`` and ``advice.finding_lines``.
"""
