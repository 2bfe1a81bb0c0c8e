"""The model beside Hugging Face's BertForSequenceClassification: names, hidden states, training, and back again.

The paths come from ctest: TEXT_TOOL, TESSERA. Runs with the Python of .deps/venv (`make test` installs its packages).
"""
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import safetensors.torch
import torch
import transformers
from hugging_face_tokenizer_test import TokenizerTest  # noqa: F401, runs in this process: transformers takes seconds to import
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, BertTokenizer

transformers.logging.disable_progress_bar()
TOOL, TESSERA = os.environ["TEXT_TOOL"], os.environ["TESSERA"]

SHAPE = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 56,
         "max_position_embeddings": 20, "type_vocab_size": 3, "layer_norm_eps": 1e-7}
LABELS = ["bad", "fair", "good"]


def random_bert(kind=BertForSequenceClassification):
    """Weights far from their initial values, so that each affects the output."""
    torch.manual_seed(11)
    model = kind(BertConfig(**SHAPE, num_labels=len(LABELS), hidden_dropout_prob=0, attention_probs_dropout_prob=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


class BertTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_bert_")))

    def ask(self, weights, inputs):
        request = {"model": {"type": "bert", **SHAPE}, "labels": LABELS, "weights": str(weights),
                   **{name: tensor.tolist() for name, tensor in inputs.items()}}
        outcome = subprocess.run([TOOL, "bert"], input=json.dumps(request), capture_output=True, text=True, check=False)
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        answer = json.loads(outcome.stdout)
        return torch.tensor(answer["hidden"]), torch.tensor(answer["logits"]), outcome.stderr

    @staticmethod
    def inputs():
        torch.manual_seed(12)
        lengths = torch.tensor([20, 1, 13, 7, 19])
        return {"input_ids": torch.randint(SHAPE["vocab_size"], (5, 20)),
                "attention_mask": (torch.arange(20) < lengths[:, None]).long(),
                "token_type_ids": torch.randint(SHAPE["type_vocab_size"], (5, 20))}

    def compare(self, ours, theirs, mask):
        self.assertLess(((ours - theirs) * mask.unsqueeze(-1)).abs().max().item(), 2e-5)

    def test_hidden_states_and_logits(self):
        model, inputs = random_bert(), self.inputs()
        model.save_pretrained(self.folder / "hf")
        hidden, logits, err = self.ask(self.folder / "hf", inputs)
        with torch.no_grad():
            self.compare(hidden, model.bert(**inputs).last_hidden_state, inputs["attention_mask"])
            self.assertLess((logits - model(**inputs).logits).abs().max().item(), 2e-5)
        self.assertEqual(err, "", "nothing was missing")

    def test_a_pretrained_body_without_our_classifier(self):
        inputs = self.inputs()
        for kind, missing in ((BertModel, "classifier"), (BertForMaskedLM, "bert.pooler.dense")):
            with self.subTest(kind=kind.__name__):
                model = random_bert(kind)
                model.save_pretrained(self.folder / kind.__name__)
                hidden, _, err = self.ask(self.folder / kind.__name__, inputs)
                body = model if kind is BertModel else model.bert
                with torch.no_grad():
                    self.compare(hidden, body(**inputs).last_hidden_state, inputs["attention_mask"])
                self.assertIn(f"these stay as they were: {missing}.weight: not in the file", err)
                self.assertIn("classifier.weight", err)

    def write_reviews(self):
        """As many texts as one batch of the run has, so that their order doesn't matter."""
        words = ["alpha", "beta", "gamma", "delta", "##x", "very", "not", "!", "书", "好"]
        vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]
        (self.folder / "vocab.txt").write_text("".join(word + "\n" for word in vocab), encoding="utf-8")
        texts = [(LABELS[i % 3], " ".join(words[(i * (j + 3) + j) % len(words)].lstrip("#") for j in range(1 + i % 5)) + " n" * (i // 5))
                 for i in range(24)]
        self.assertEqual(len({text for _, text in texts}), 24)
        (self.folder / "reviews.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in texts), encoding="utf-8")
        return texts

    def test_training_from_its_weights_is_pytorchs(self):
        model, texts = random_bert(), self.write_reviews()
        model.save_pretrained(self.folder / "hf")
        (self.folder / "run.json").write_text(json.dumps({
            "model": {"type": "bert", **SHAPE, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
            "data": {"type": "labelled_text", "path": "reviews.tsv", "labels": LABELS, "tokenizer": "wordpiece", "vocab": "vocab.txt",
                     "max_length": 8, "validation_fraction": 0, "test_fraction": 0},
            "trainer": {"max_steps": 3, "output_dir": "run", "device": "cpu"}, "train_batch_size": 24, "steps_per_print": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "zero_optimization": {"stage": 3}, "checkpoint": {"fsync": False}}))
        outcome = subprocess.run([TESSERA, "train", "run.json", "--nproc", "2", "--init", "hf"], cwd=self.folder, capture_output=True,
                                 text=True, check=False)
        self.assertEqual(outcome.returncode, 0, outcome.stdout + outcome.stderr)
        losses = [json.loads(line)["loss"] for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]

        tokenizer = BertTokenizer(vocab=str(self.folder / "vocab.txt"))
        inputs = tokenizer([text for _, text in texts], padding=True, truncation=True, max_length=8, return_tensors="pt")
        labels = torch.tensor([LABELS.index(label) for label, _ in texts])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for loss in losses:
            result = model(**inputs, labels=labels)
            self.assertAlmostEqual(loss, result.loss.item(), delta=1e-5)
            optimizer.zero_grad()
            result.loss.backward()
            optimizer.step()
        self.assertEqual(len(losses), 3)
        ours = safetensors.torch.load_file(self.folder / "run/model.safetensors")
        self.assertEqual(set(ours), set(model.state_dict()))
        for name, tensor in model.state_dict().items():
            self.assertLess((ours[name] - tensor).abs().max().item(), 2e-5, name)
        self.assertEqual((self.folder / "run/vocab.txt").read_text(), (self.folder / "vocab.txt").read_text())
        # And back: the exported model is a Hugging Face model.
        (self.folder / "run/config.json").write_text(model.config.to_json_string())
        again = BertForSequenceClassification.from_pretrained(self.folder / "run").eval()
        with torch.no_grad():
            self.assertLess((again(**inputs).logits - model(**inputs).logits).abs().max().item(), 1e-3)


if __name__ == "__main__":
    unittest.main()
