"""A BERT learns with the Hugging Face Trainer whether a Chinese review is positive. Without its first import line this is a script for
DeepSpeed; with it Tessera trains, on GPUs or on CPU ranks.

    make data                                                          # fetches the reviews to data/reviews
    tessera launch -n 2 -- python examples/python/reviews_trainer.py   # or: torchrun --nproc-per-node 2 ...
    tessera launch -n 2 -- python examples/python/reviews_trainer.py --stage 3 --model FOLDER   # a pretrained BERT and its tokenizer

The folder --out then has the model and its tokenizer, as transformers.pipeline("text-classification", FOLDER) reads them.
"""
import tessera.deepspeed  # noqa: F401  isort: skip  the one line
import argparse
import collections
import random
from pathlib import Path

import torch
import transformers as hf
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

LABELS = ["neg", "pos"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def read_reviews(folder):
    """[(text, label)] of FOLDER/neg.txt and pos.txt, a review a line; each text once, without those under both labels."""
    labels = collections.defaultdict(set)
    for label, name in enumerate(LABELS):
        for line in Path(folder, f"{name}.txt").read_text(encoding="utf-8-sig").splitlines():
            if line.strip():
                labels[line.strip()].add(label)
    return [(text, found.pop()) for text, found in labels.items() if len(found) == 1]


def split(samples, test_fraction=0.1):
    """(training, test), the same on every rank and in every run."""
    samples = sorted(samples)
    random.Random(0).shuffle(samples)
    size = int(len(samples) * test_fraction)
    return samples[size:], samples[:size]


def character_tokenizer(texts):
    """A token a character, of those that come twice."""
    counts = collections.Counter(character for text in texts for character in text.lower() if not character.isspace())
    vocabulary = SPECIAL + [character for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count > 1]
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), "")])
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
                                      model_max_length=128)


def model_and_tokenizer(folder, texts):
    if folder:
        return (hf.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(LABELS)), hf.AutoTokenizer.from_pretrained(folder))
    tokenizer = character_tokenizer(texts)
    shape = hf.BertConfig(vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
                          max_position_embeddings=128, num_labels=len(LABELS), id2label=dict(enumerate(LABELS)),
                          label2id={label: i for i, label in enumerate(LABELS)})
    return hf.BertForSequenceClassification(shape), tokenizer


class Reviews(torch.utils.data.Dataset):
    def __init__(self, samples, tokenizer):
        self.ids = tokenizer([text for text, _ in samples], truncation=True, max_length=128)["input_ids"]
        self.labels = [label for _, label in samples]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def deepspeed_config(stage):
    """As DeepSpeed's users write it; the Trainer fills in what is "auto"."""
    return {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}}


def parse_arguments():
    parser = argparse.ArgumentParser(description="Trains a BERT on Chinese reviews with the Hugging Face Trainer.")
    parser.add_argument("--data", default="data/reviews", help="a folder with neg.txt and pos.txt")
    parser.add_argument("--model", default=None, help="a folder with a pretrained BERT and its tokenizer; by default a small one from nothing")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--rate", type=float, default=7e-4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--out", default="runs/reviews_trainer")
    return parser.parse_args()


def main():
    options = parse_arguments()
    hf.set_seed(42)
    train, test = split(read_reviews(options.data))
    model, tokenizer = model_and_tokenizer(options.model, [text for text, _ in train])
    trainer = hf.Trainer(
        model=model, processing_class=tokenizer, data_collator=hf.DataCollatorWithPadding(tokenizer), compute_metrics=accuracy,
        train_dataset=Reviews(train, tokenizer), eval_dataset=Reviews(test, tokenizer),
        args=hf.TrainingArguments(
            output_dir=options.out, deepspeed=deepspeed_config(options.stage), per_device_train_batch_size=16,
            per_device_eval_batch_size=64, num_train_epochs=options.epochs, max_steps=options.max_steps, learning_rate=options.rate,
            warmup_steps=min(200, max(0, options.max_steps) // 10 or 200), weight_decay=0.05, bf16=options.bf16,
            use_cpu=not torch.cuda.is_available(), logging_steps=50,
            eval_strategy="epoch" if options.max_steps < 0 else "no", save_strategy="no", report_to=[], disable_tqdm=True, seed=42))
    trainer.train()
    reached = trainer.evaluate()
    trainer.save_model(options.out)
    if trainer.is_world_process_zero():
        print(f"after {trainer.state.global_step} steps: test accuracy {reached['eval_accuracy']:.4f} on {len(test)} reviews; "
              f"{options.out} has the model", flush=True)


if __name__ == "__main__":
    main()
