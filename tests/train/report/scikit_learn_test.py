"""Classification reports beside scikit-learn's, number by number and letter by letter.

The path comes from ctest: CLASSIFICATION_REPORT_TOOL. Runs with the Python of .deps/venv (`make test` installs its packages).
"""
import json
import os
import subprocess
import unittest

import numpy as np
from sklearn.metrics import classification_report

TOOL = os.environ["CLASSIFICATION_REPORT_TOOL"]


def ask(logits, target, names, digits):
    request = {"logits": logits.tolist(), "target": target.tolist(), "names": names, "digits": digits}
    return json.loads(subprocess.run([TOOL], input=json.dumps(request), capture_output=True, text=True, check=True).stdout)


class ScikitLearnTest(unittest.TestCase):
    def check(self, logits, target, names, digits=4):
        num_classes = logits.shape[1]
        ours = ask(logits, target, names, digits)
        options = {"labels": range(num_classes), "target_names": names or None, "digits": digits, "zero_division": 0}
        predicted = logits.argmax(1)
        theirs = classification_report(target, predicted, output_dict=True, **options)
        self.assertEqual(ours["text"] + "\n", classification_report(target, predicted, **options))
        self.assertAlmostEqual(ours["accuracy"], theirs["accuracy"], delta=1e-12)
        shown = [names[i] if names else str(i) for i in range(num_classes)]
        for key, scores in [*zip(shown, ours["classes"]), ("macro avg", ours["macro"]), ("weighted avg", ours["weighted"])]:
            expected = [theirs[key][name] for name in ("precision", "recall", "f1-score", "support")]
            np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-12, err_msg=key)

    def test_random_predictions(self):
        random = np.random.default_rng(1)
        for num_classes, num_samples in ((2, 8), (2, 1000), (3, 50), (10, 5000)):
            with self.subTest(num_classes=num_classes, num_samples=num_samples):
                target = random.integers(num_classes, size=num_samples)
                logits = random.normal(size=(num_samples, num_classes)) + 1.5 * np.eye(num_classes)[target]
                self.check(logits, target, [])
                self.check(logits, target, [f"class {'x' * i}" for i in range(num_classes)], digits=2)

    def test_classes_nobody_has_or_predicts(self):
        random = np.random.default_rng(2)
        target = np.array([0, 0, 3, 3, 3, 1] * 5)
        logits = random.normal(size=(30, 5))
        logits[:, [1, 4]] = -9  # never predicted; 2 is never right; 4 is neither
        self.check(logits, target, ["a", "a name of some length", "坏", "d", "e"])


if __name__ == "__main__":
    unittest.main()
