"""The Hugging Face Trainer fine-tunes a BERT with ZeRO-3, and transformers' pipeline reads what it saves. Without its first import line this is
a script for DeepSpeed. The model learns which of three modules of SciPy a line of documentation is from. It is small, with random values;
an argument names a folder with a pretrained BERT and its tokenizer instead.

    tessera launch -n 2 -- python examples/gallery/trainer.py
    after 250 steps: accuracy 0.78 on 500 lines; runs/trainer has the model
"""
import tessera.deepspeed  # noqa: F401  isort: skip  the one line
import collections
import importlib
import inspect
import random
import re
import sys

import transformers as hf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

LABELS = ["scipy.optimize", "scipy.signal", "scipy.stats"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def lines_of(module):
    """Of prose alone: some examples there are made anew by each process, and differ."""
    texts = [inspect.getdoc(getattr(module, name)) or "" for name in sorted(module.__all__)]
    return {line.strip() for text in texts for line in text.splitlines() if re.fullmatch(r" *([A-Za-z(][A-Za-z,.)]* +){7}[A-Za-z ,.()]+", line)}


def samples():
    """(training, test): [(text, label)] without lines that two modules have, the same on every rank."""
    lines = [lines_of(importlib.import_module(name)) for name in LABELS]
    counts = collections.Counter(line for one in lines for line in one)
    found = sorted((line, label) for label, one in enumerate(lines) for line in one if counts[line] == 1)
    random.Random(0).shuffle(found)
    return found[500:], found[:500]


def word_tokenizer(texts):
    """A token a word, of those that come twice."""
    normalize, cut = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    counts = collections.Counter(word for text in texts for word, _ in cut.pre_tokenize_str(normalize.normalize_str(text)))
    words = SPECIAL + sorted(word for word, count in counts.items() if count > 1)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalize, cut
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64)


def model_and_tokenizer(folder, texts):
    labels = {"num_labels": len(LABELS), "id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
    if folder:
        return hf.AutoModelForSequenceClassification.from_pretrained(folder, **labels), hf.AutoTokenizer.from_pretrained(folder)
    tokenizer = word_tokenizer(texts)
    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                                          intermediate_size=128, max_position_embeddings=64, **labels)), tokenizer


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    hf.set_seed(42)
    train, test = samples()
    model, tokenizer = model_and_tokenizer(folder, [text for text, _ in train])
    train, test = ([{**tokenizer(text, truncation=True, max_length=64), "labels": label} for text, label in some] for some in (train, test))
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    trainer = hf.Trainer(
        model=model, processing_class=tokenizer, data_collator=hf.DataCollatorWithPadding(tokenizer), train_dataset=train, eval_dataset=test,
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        args=hf.TrainingArguments(
            output_dir="runs/trainer", deepspeed={"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": zero},
            per_device_train_batch_size=16, per_device_eval_batch_size=100, max_steps=250, learning_rate=2e-3, warmup_steps=25, weight_decay=0.05,
            average_tokens_across_devices=False, logging_steps=50, save_strategy="no", report_to=[], disable_tqdm=True, seed=42))
    trainer.train()
    reached = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"after {trainer.state.global_step} steps: accuracy {reached:.2f} on {len(test)} lines; runs/trainer has the model", flush=True)


if __name__ == "__main__":
    main()
