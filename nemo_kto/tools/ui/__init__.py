"""A local web page for those who do not type commands: data, model, check, plan, training and chat, by Gradio.

It starts the commands of this package as processes and shows their output, so that it can do nothing that they cannot. Of
the core it uses ``data.rows.read_rows`` for the columns of a file, ``config.override_value`` for the words of a command, and
``records`` for the state and the curves of a run.
"""
