#!/bin/bash
# Builds HDF5 into .deps/hdf5, once: static, for shared libraries (PIC), with zlib and without szip, curl and
# thread-safety (checkpoint/hdf5/hdf5_library.h locks). Debian's own is linked to curl, Kerberos and LDAP, and its libhdf5.a is
# no PIC. The source is Debian's source package, named with its SHA-256 in packages.txt; no root is needed.
#
#   scripts/hdf5.sh          does nothing where it is built already
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

readonly PREFIX="$ROOT/.deps/hdf5" WORK="$ROOT/.deps/hdf5-work"
read -r name_version SHA256 < <(sed -n '/^# \[source\]/,$ s/^\(hdf5=[^ ]*\)  *\([0-9a-f]*\) .*/\1 \2/p' packages.txt)
readonly VERSION="${name_version#hdf5=}" SHA256

# The source packages of the system's own sources, in a package index of our own: the system's may have none, and is left alone.
download() {
  mkdir -p "$WORK"/{lists/partial,cache/archives/partial,parts}
  local file
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    [[ -e $file ]] || continue
    case "$file" in
      *.list) sed -n 's/^deb /deb-src /p' "$file" ;;
      *.sources) sed 's/^Types:.*/Types: deb-src/' "$file" ;;
      *) continue ;;
    esac >"$WORK/parts/${file##*/}"
  done
  local options=(-o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$WORK/parts"
    -o "Dir::State::Lists=$WORK/lists" -o "Dir::Cache=$WORK/cache" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update || echo "apt-get update failed; continuing with the package lists that are there"
  (cd "$WORK" && apt-get "${options[@]}" source --download-only --tar-only hdf5)
  ls "$WORK/hdf5_$VERSION.orig.tar."* >/dev/null ||
    fail "Debian's source package hdf5 is no longer $VERSION: see packages.txt"
  sha256sum --check --strict <<<"$SHA256  $(echo "$WORK/hdf5_$VERSION.orig.tar."*)"
}

# -O1 takes three quarters of the time of -O2, which `make demo` waits for; Tessera reads and writes data past HDF5.
build() {
  mkdir "$WORK/source"
  tar --extract --file "$(echo "$WORK/hdf5_$VERSION.orig.tar."*)" --directory "$WORK/source" --strip-components 1
  cd "$WORK/source"
  CFLAGS="-O1 -w -ffile-prefix-map=$PWD/=" ./configure --prefix="$PREFIX" --disable-shared --with-pic --disable-hl \
    --disable-tests --disable-tools --with-zlib --without-szlib --with-default-api-version=v18 \
    --enable-build-mode=production --disable-embedded-libinfo --disable-dependency-tracking
  make -C src -j "${JOBS:-$(nproc)}"
  rm -rf "$PREFIX"
  make -C src install
  cp COPYING "$PREFIX"
}

make_hdf5() {
  rm -rf "$WORK"
  download
  build
  cd "$ROOT"
  rm -rf "$WORK"
}

stamp="$PREFIX/built-from"
state="hdf5 $VERSION $SHA256 $(sha256sum <"${BASH_SOURCE[0]}")"
[[ -e $stamp && $(<"$stamp") == "$state" ]] && exit 0
command -v apt-get >/dev/null || fail "no Debian system: build HDF5 $VERSION into .deps/hdf5 yourself (see scripts/hdf5.sh)"
step "HDF5 from its source (14 MB to download)" hdf5 make_hdf5
echo "$state" >"$stamp"
