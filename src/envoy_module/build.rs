//! Links libgcc into the library: it unwinds panics, and images of Envoy lack `libgcc_s.so.1`.
//!
//! Rust links with `-lgcc_s`. The linker finds this script of that name first, which names the static libraries.

use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    let folder = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(folder.join("libgcc_s.so"), "INPUT(-lgcc_eh -lgcc)\n")?;
    println!("cargo:rustc-cdylib-link-arg=-L{}", folder.display());
    Ok(())
}
