#!/bin/sh
# cargo for maturin: maturin writes SOURCE_DATE_EPOCH into the SBOM, and cargo compiles C code again when it changes.
unset SOURCE_DATE_EPOCH
exec cargo "$@"
