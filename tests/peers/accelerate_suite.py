"""Runs Accelerate's own tests of its DeepSpeed plugin, and of its example scripts, on CPU ranks against tessera.deepspeed.

    make test-peers ACCELERATE=folder                     # of a checkout of https://github.com/huggingface/accelerate
    .deps/venv/bin/python tests/peers/accelerate_suite.py ACCELERATE [--only REGEX] [--json FILE]

Nothing of the tests is changed: they are copied, and their processes find tessera.deepspeed as deepspeed (site/sitecustomize.py). Those
that ask for a GPU run on the CPU (site/accelerate_on_cpu.py). Models that they fetch by name are small ones with random values, made here,
in folders of those names. The example scripts run as `accelerate launch --use_deepspeed`. accelerate_suite.json lists the tests that fail
on purpose, with the reason. Exit code 1: another test has failed.
"""
import argparse
import csv
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import suite

PACKAGES = ("datasets", "evaluate", "parameterized", "schedulefree")  # not in requirements.txt
FILES = ["tests/deepspeed/test_deepspeed.py", "tests/deepspeed/test_deepspeed_gradient_accumulation.py",
         "tests/deepspeed/test_deepspeed_multiple_model.py"]


def make_models(folder):
    """Small models, with the names of those that the tests fetch."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        MobileViTConfig,
        PreTrainedTokenizerFast,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
    )
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(33, 127)), *(f"##{chr(code)}" for code in range(33, 127))]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
                                   mask_token="[MASK]", model_max_length=128)
    small = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=1024, n_positions=128)
    for name in ("gpt2", "sshleifer/tiny-gpt2", "hf-internal-testing/tiny-random-gpt2", "EleutherAI/gpt-neo-125m", "HuggingFaceTB/SmolLM-360M"):
        GPT2LMHeadModel(small).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    MobileViTConfig(hidden_sizes=[144, 192, 240]).save_pretrained(folder / "apple/mobilevit-xx-small")
    Qwen2MoeForCausalLM(Qwen2MoeConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=1024,
                                       intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4)
                        ).save_pretrained(folder / "peft-internal-testing/tiny-random-qwen-1.5-MoE")
    bert = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=len(words))
    for name in ("bert-base-cased", "distilbert-base-uncased"):
        BertForSequenceClassification(bert).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)


def make_data(folder):
    """GLUE's MRPC, of the samples in Accelerate's tests; and its metric, which evaluate.load("glue", "mrpc") finds without a network."""
    data = folder / "nyu-mll" / "glue"
    data.mkdir(parents=True)
    splits = ""
    for split, name in (("train", "train.csv"), ("validation", "dev.csv")):
        with open(folder / "tests" / "test_samples" / "MRPC" / name, newline="") as source, open(data / name, "w", newline="") as out:
            writer = csv.writer(out)
            writer.writerow(["sentence1", "sentence2", "label", "idx"])
            for i, row in enumerate(csv.DictReader(source)):
                writer.writerow([row["sentence1"], row["sentence2"], int(row["label"] == "equivalent"), i])
        splits += f"  - split: {split}\n    path: {name}\n"
    (data / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{splits}---\n")
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(GLUE)


GLUE = """
import datasets
import evaluate

class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="of MRPC", citation="", inputs_description="", features=features, format="numpy")

    def _compute(self, predictions, references):
        right = [a == b for a, b in zip(predictions, references)]
        found = sum(a == b == 1 for a, b in zip(predictions, references))
        return {"accuracy": sum(right) / len(right), "f1": 2 * found / max(1, sum(predictions) + sum(references))}
"""


def run_examples(folder, scripts, environment, limit_s=600):
    """As `suite.run`, of scripts: each on two ranks at stage 2."""
    results = []
    for name, words in scripts.items():
        begin = time.monotonic()
        command = ["accelerate", "launch", "--use_deepspeed", "--zero_stage", "2", "--num_processes", "2", "--num_machines", "1",
                   "--mixed_precision", "no", str(folder / name), *words]
        try:
            done = subprocess.run(command, cwd=folder, timeout=limit_s, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                                  env=suite.environment_with(environment))
            code, text = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, text = f"over {limit_s} s", (error.stdout or b"").decode(errors="replace")
        with open(folder / "output_examples.txt", "a") as output:
            output.write(f"== {name}\n{text}\n")
        said = [line for line in text.splitlines() if re.search(r"\w(Error|Exception): .", line) and "ChildFailedError" not in line]
        results.append((name, "passed" if code == 0 else "failed", f"exit code {code}: {said[-1] if said else ''}"[:300]))
        print(f"{name}: {results[-1][1]}, {time.monotonic() - begin:.0f} s", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suite.add_arguments(parser)
    given = parser.parse_args()
    if not (given.source / "tests" / "deepspeed" / "test_deepspeed.py").is_file():
        sys.exit(f"error: {given.source}: has no tests/deepspeed/test_deepspeed.py; expected a checkout of Accelerate")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"error: {', '.join(missing)} not installed in {sys.prefix}; expected them for Accelerate's tests: "
                 f"{sys.executable} -m pip install {' '.join(missing)}")
    listed = json.loads((suite.HERE / "accelerate_suite.json").read_text())
    with tempfile.TemporaryDirectory(prefix="tessera_peers_") as name:
        folder = Path(name)
        for part in ("tests", "examples"):
            shutil.copytree(given.source / part, folder / part)
        make_models(folder)
        make_data(folder)
        environment = {"TESSERA_PEER_NAMES": "{}", "RUN_SLOW": "1", "TESTING_MOCKED_DATALOADERS": "1", "TRANSFORMERS_OFFLINE": "1",
                       "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
        results = suite.run(folder, [one for one in FILES if re.search(given.files, one)], environment, given.only,
                            options=("-p", "accelerate_on_cpu"))
        if not given.only:
            results += run_examples(folder, {one: words for one, words in listed["examples"].items() if re.search(given.files, one)}, environment)
        if given.json:
            suite.write(given.json, results, folder)
    return suite.conclude(results, listed["expected_failures"])


if __name__ == "__main__":
    sys.exit(main())
