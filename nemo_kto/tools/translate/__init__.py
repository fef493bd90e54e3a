"""The command `nemo-kto translate`: configurations of TRL and ms-swift as commands of this program.

It uses the core by ``algorithms.recipes`` (RECIPES), ``config.migration`` (names of other trainers), ``config.schema``
(config_type, for the keys), ``config.checker`` (find_mistakes, read_positions, override_value, SHORT), ``cli.job``
(refuse_mistakes), and helpers of ``utils`` and ``errors``.
"""
