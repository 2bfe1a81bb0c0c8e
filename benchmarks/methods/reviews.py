"""The data of `data.type: labelled_text` as the command sees it: texts, parts, vocabulary, batches and their order."""
import collections
import sys
from pathlib import Path

import torch
from tokenizers.normalizers import BertNormalizer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "examples"))
from sampler import shuffled_indices  # noqa: E402  (train/task/sampler.h in Python)

SPACES = " \t\r\n\v\f\u00a0\u3000"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
PAD, UNKNOWN, CLS, SEP = range(4)
DEFAULTS = {"labels": ["neg", "pos"], "tokenizer": "character", "vocab": "", "lower_case": True, "min_frequency": 1, "max_length": 128,
            "validation_fraction": 0.1, "test_fraction": 0.1, "split_seed": 0, "deduplicate": True}


class Reviews:
    """The parts "train", "validation" and "test": lists of (ids, label); and the vocabulary's tokens."""

    def __init__(self, data):
        self.options = {**DEFAULTS, **data}
        if self.options["tokenizer"] != "character" or self.options["vocab"]:
            raise SystemExit('error: data.tokenizer: found other than "character", or a data.vocab; expected "character" alone')
        samples = self.read()
        parts = self.split(len(samples))
        normalizer = BertNormalizer(clean_text=True, handle_chinese_chars=False, lowercase=self.options["lower_case"])
        characters = ["".join(normalizer.normalize_str(text).split()) for text, _ in samples]
        self.tokens = self.vocabulary(characters[i] for i in parts["train"])
        number, room = {token: i for i, token in enumerate(self.tokens)}, self.options["max_length"] - 2

        def encoded(i):
            return torch.tensor([CLS, *(number.get(c, UNKNOWN) for c in characters[i][:room]), SEP]), samples[i][1]

        self.parts = {name: [encoded(i) for i in indices] for name, indices in parts.items()}

    def read(self):
        """(text, label) of each text once; those with several labels are left out. By label, in the order of the files."""
        samples = []
        for label, name in enumerate(self.options["labels"]):
            lines = (Path(self.options["path"]) / f"{name}.txt").read_bytes().decode("utf-8-sig").split("\n")
            samples += [(text, label) for text in (line.strip(SPACES) for line in lines) if text]
        if not self.options["deduplicate"]:
            return samples
        labels = collections.defaultdict(set)
        for text, label in samples:
            labels[text].add(label)
        return [(text, label) for text, label in dict.fromkeys(samples) if len(labels[text]) == 1]

    def split(self, size):
        order = shuffled_indices(size, self.options["split_seed"], 0)
        test = int(self.options["test_fraction"] * size)
        validation = test + int(self.options["validation_fraction"] * size)
        return {"train": order[validation:], "validation": order[test:validation], "test": order[:test]}

    def vocabulary(self, texts):
        counts = collections.Counter()
        for text in texts:
            counts.update(text)
        frequent = [c for c, count in counts.items() if count >= self.options["min_frequency"]]
        return SPECIAL + sorted(frequent, key=lambda c: (-counts[c], c))

    def collate(self, samples):
        """As Hugging Face's models take them, filled up to the longest text, rounded up to a multiple of 8."""
        longest = max(len(ids) for ids, _ in samples)
        length = min((longest + 7) // 8 * 8, self.options["max_length"])
        first = torch.nn.functional.pad(samples[0][0], (0, length - len(samples[0][0])), value=PAD)
        input_ids = pad_sequence([first, *(ids for ids, _ in samples[1:])], batch_first=True, padding_value=PAD)
        labels = torch.tensor([label for _, label in samples])
        return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(), "labels": labels}

    def eval_loader(self, part, batch_size, rank, world):
        """Every sample once over all ranks."""
        every = torch.arange(len(self.parts[part])).split(batch_size)
        return DataLoader(self.parts[part], batch_sampler=[batch.tolist() for batch in every[rank::world]], collate_fn=self.collate)


class Order(Sampler):
    """A rank's samples of an epoch: of every global batch its slice. set_epoch, called for each epoch, shuffles."""

    def __init__(self, size, batch_size, seed, num_epochs, rank=0, world=1):
        self.batch_size, self.rank, self.share = batch_size, rank, batch_size // world
        self.num_batches, self.epoch = size // batch_size, 0
        # Made beforehand: the command's generator is slow in Python, which has faster ones.
        self.orders = [shuffled_indices(size, seed, epoch) for epoch in range(num_epochs)]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_batches * self.share

    def __iter__(self):
        order = self.orders[self.epoch]
        for batch in range(self.num_batches):
            begin = batch * self.batch_size + self.rank * self.share
            yield from order[begin:begin + self.share]
