"""WordPiece beside Hugging Face's BertTokenizer, on many scripts and on random text.

The path comes from ctest: TEXT_TOOL. Runs with the Python of .deps/venv (`make test` installs its packages).
"""
import json
import os
import random
import subprocess
import tempfile
import unicodedata
import unittest
from pathlib import Path

from tokenizers import BertWordPieceTokenizer
from transformers import BertTokenizer

TOOL = os.environ["TEXT_TOOL"]

TEXTS = [
    "", " ", "The quick brown fox jumped over the lazy dog.", "unaffable UNAFFABLE un-affable",
    "Don't stop, it's 50% off: $9.99 (was £12,000.00)! a@b.com #1 ^_^ `x` ~y~ {z} [q] <w> | \\ /",
    "这本书很好，我很喜欢。不过价格有点贵！", "㐀㐁 豈更車 \U00020000\U0002a6d6 丽丸", "東京タワーに行きました。ｶﾀｶﾅ ＡＢＣ１２３",
    "한국어 문장입니다. 각각", "Ünïcödé façade naïve Ångström ŒUVRE straße İstanbul ısı ǅ ﬁ ﬂ Ⅷ ½ ²",
    "Ελληνικά ΌΣΟΣ Σ ᾳ ώ", "Русский ЁЖ й Й", "עברית שָׁלוֹם", "العربية مَرْحَبًا ١٢٣", "हिन्दी क्षत्रिय नमस्ते", "ภาษาไทย สวัสดีครับ",
    "Tiếng Việt rất đẹp", "ქართული ᲐᲑᲒ", "አማርኛ", "தமிழ் தொழில்", "😀😃👨‍👩‍👧‍👦🇩🇪👍🏽 ok", "“quotes” ‘single’ «fr» —dash– … ‰ † • ¿qué? ¡sí!",
    "tab\tnew\nline\rcr\x0bvt\x0cff\x1cfs\x85nel\u00a0nbsp\u1680ogham\u2003em\u2028ls\u2029ps\u202fn\u205fm\u3000i",
    "zero\u200bwidth\u200cnon\u200djoiner\u00adsoft\ufeffbom\u2060wj\ufffdrepl\x00nul\x7fdel\ue000private",
    "e\u0301 a\u0308\u0304 o\u0328\u0301 \u0345 \u20dd \u1dc4 a\u0327\u0301", "x" * 100, "x" * 101, "é" * 100 + " " + "é" * 101, "e\u0301" * 60,
    "a" * 99 + "b", "!" * 150, "好" * 150, "under_score snake_case CamelCase kebab-case 3.14e-10 1,000 C++ C# .NET",
]


def vocabulary():
    """Letters of all these texts, as word beginnings and inside of words, but for some; and a few longer pieces."""
    letters = set()
    for text in TEXTS:
        for form in (text, unicodedata.normalize("NFD", text), unicodedata.normalize("NFD", text).lower()):
            letters.update(c for c in form if not c.isspace() and unicodedata.category(c)[0] != "C")
    pieces = ["the", "quick", "##ick", "un", "##aff", "##able", "##ffa", "很好", "ing", "##ing", "русск", "##ий", "스", "##tan", "is", "xx", "##xx",
              "##" + "x" * 9, "3", "##14", "##一"]
    kept = sorted(c for i, c in enumerate(sorted(letters)) if i % 17 != 5)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *kept, *("##" + c for i, c in enumerate(kept) if i % 13 != 3)]
    return tokens + [piece for piece in pieces if piece not in tokens]


def is_settled(c):
    """The library's Unicode tables are older: characters have been added and categories changed since."""
    category = unicodedata.category(c)
    return unicodedata.ucd_3_2_0.category(c) == category and category not in ("Cn", "Cs")


class TokenizerTest(unittest.TestCase):
    def setUp(self):
        self.vocab = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="tessera_tokenizer_"))) / "vocab.txt"
        self.vocab.write_text("".join(token + "\n" for token in vocabulary()), encoding="utf-8")

    def ours(self, texts, lower_case, max_length=512, kind="wordpiece"):
        outcome = subprocess.run([TOOL, "tokens", kind, str(self.vocab), str(lower_case).lower(), str(max_length)],
                                 input=json.dumps(texts), capture_output=True, text=True, check=False)
        self.assertEqual(outcome.returncode, 0, outcome.stderr)
        return json.loads(outcome.stdout)

    def test_bert_tokenizer(self):
        for lower_case in (True, False):
            theirs = BertTokenizer(vocab=str(self.vocab), do_lower_case=lower_case)
            for text, ids in zip(TEXTS, self.ours(TEXTS, lower_case)):
                with self.subTest(lower_case=lower_case, text=text[:60]):
                    self.assertEqual(theirs.convert_ids_to_tokens(ids), theirs.convert_ids_to_tokens(theirs(text)["input_ids"]))

    def test_truncation(self):
        theirs = BertTokenizer(vocab=str(self.vocab))
        for max_length in (2, 3, 7, 16):
            with self.subTest(max_length=max_length):
                expected = [theirs(text, truncation=True, max_length=max_length)["input_ids"] for text in TEXTS]
                self.assertEqual(self.ours(TEXTS, True, max_length), expected)

    def test_random_text(self):
        settled = [chr(c) for c in range(1, 0x2fa20) if is_settled(chr(c))]
        source = random.Random(3)
        pools = [settled, [c for c in settled if ord(c) < 0x250], [c for c in settled if 0x250 <= ord(c) < 0x3000],
                 [c for text in TEXTS for c in text]]
        texts = ["".join(source.choice(pool) if source.random() < 0.8 else " " for _ in range(40)) for pool in pools for _ in range(300)]
        for lower_case in (True, False):
            theirs = BertWordPieceTokenizer(str(self.vocab), lowercase=lower_case)
            for text, ids in zip(texts, self.ours(texts, lower_case)):
                self.assertEqual(ids, theirs.encode(text).ids, (lower_case, text.encode("unicode_escape")))

    def test_every_character(self):
        """Between two letters each character is kept, separates, is a token of its own or is removed."""
        self.vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nab\n", encoding="utf-8")
        characters = [chr(c) for c in range(1, 0x30000) if not 0xd800 <= c < 0xe000]
        texts = [f"a{c}b" for c in characters]
        for lower_case in (True, False):
            theirs = BertWordPieceTokenizer(str(self.vocab), lowercase=lower_case).encode_batch(texts)
            different = [c for c, ids, encoded in zip(characters, self.ours(texts, lower_case), theirs) if ids != encoded.ids]
            self.assertEqual([hex(ord(c)) for c in different if is_settled(c)], [], lower_case)
            self.assertLess(len(different), 1000, "of nearly 200,000: what newer versions of Unicode have added or moved")

    def test_characters(self):
        tokens = vocabulary()
        for text in ("这本书很好，我喜欢 it", "ABC déf"):
            plain = "".join(c for c in unicodedata.normalize("NFD", text).lower() if unicodedata.category(c) != "Mn")
            expected = ["[CLS]", *(c if c in tokens else "[UNK]" for c in plain if c != " "), "[SEP]"]
            self.assertEqual([tokens[i] for i in self.ours([text], True, kind="character")[0]], expected)


if __name__ == "__main__":
    unittest.main()
