"""KTO of a GPT model, with the command line of NeMo-Aligner:

    python examples/nlp/gpt/train_gpt_kto.py pretrained_checkpoint.restore_from_path=MODEL model.data.data_prefix=DATA

The configuration is conf/gpt_kto.yaml; `nemo-kto kto` is the same.
"""

from nemo_kto.launch.cli import train
from nemo_kto.recipes import RECIPES

if __name__ == "__main__":
    train(RECIPES["kto"])
