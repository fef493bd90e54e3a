"""KTO of a GPT model, with the command line of NeMo-Aligner:

    python examples/nlp/gpt/train_gpt_kto.py MODEL DATA

The configuration is conf/gpt_kto.yaml; `nemo-kto kto` is the same.
"""

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.main import train

if __name__ == "__main__":
    train(RECIPES["kto"])
