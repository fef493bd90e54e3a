"""DPO and its variants, of a GPT model, with the command line of NeMo-Aligner:

    python examples/nlp/gpt/train_gpt_dpo.py MODEL DATA

The configuration is conf/gpt_dpo.yaml; `nemo-kto dpo` is the same.
"""

from nemo_kto.algorithms.recipes import RECIPES
from nemo_kto.cli.main import train

if __name__ == "__main__":
    train(RECIPES["dpo"])
