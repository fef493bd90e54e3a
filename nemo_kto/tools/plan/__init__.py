"""The plan of a run before it starts: memory and speed, the search for layouts, recipe=auto, and the check of a run.

Functions of the core that the tool uses:

- configuration: ``Checker``, ``read_positions``, ``run_errors``, ``model_gpu_rules``
- machines: ``gpus_elsewhere``, ``these_machines``, ``GPUS`` of memory/hardware.py
- memory: ``make_plan``, ``with_shared_prompts``, ``bubble_of_shorter_rows``, ``remedies``, ``is_possible``, ``changed``,
  ``overrides`` of memory/run_plan.py; ``rank_memory``; ``measure`` of shared prompts
- the check of a run: ``prepare``, ``check_export``, ``check_validation_rows``

The core asks the tool for one thing: ``auto.settle``, the layout in the place of recipe=auto.
"""
