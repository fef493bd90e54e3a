"""Rounds of feedback: answers of a model, their labels and comparisons, and the rows that a training takes.

Of the core it uses: ``data.rows`` to read prompts and rows (``read_prompts``, ``read_rows``, ``records_of_row``,
``RowErrors``); ``records.run_record`` for the result of a comparison (``is_run``, ``record_comparison``); ``model_files``
for the hash of a model and whether it has a chat template; ``telemetry.progress_bar``. Models, their answers and files of
rows are those of :mod:`nemo_kto.tools.inference`.
"""
