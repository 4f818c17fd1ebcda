//! The `attache` program.

fn main() -> std::process::ExitCode {
    attache::cli::main()
}
