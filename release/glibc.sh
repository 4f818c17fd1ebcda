#!/usr/bin/env bash
# Prints the newest version of the C library that a symbol of these files needs, such as 2.34.
#
#   release/glibc.sh FILE...
set -euo pipefail
objdump -T "$@" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -1 | cut -d_ -f2
