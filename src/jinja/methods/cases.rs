//! The methods of texts that begin with `is`.

use crate::characters::{decimal, is_cased, is_letter, is_other_number, is_printable, is_space, is_title};
use crate::{Error, Result};

/// As Python's `str.islower()`.
pub(crate) fn is_lower(text: &str) -> bool {
    text.chars().any(is_cased) && !text.chars().any(|c| c.is_uppercase() || is_title(c))
}

/// As Python's `str.isupper()`.
pub(crate) fn is_upper(text: &str) -> bool {
    text.chars().any(is_cased) && !text.chars().any(|c| c.is_lowercase() || is_title(c))
}

fn is_titled(text: &str) -> bool {
    let (mut any, mut in_word) = (false, false);
    for c in text.chars() {
        if c.is_uppercase() || is_title(c) {
            if in_word {
                return false;
            }
            (any, in_word) = (true, true);
        } else if c.is_lowercase() {
            if !in_word {
                return false;
            }
            any = true;
        } else {
            in_word = false;
        }
    }
    any
}

/// Whether all characters of a text that has any are of a kind.
fn all(text: &str, is: impl Fn(char) -> bool) -> bool {
    !text.is_empty() && text.chars().all(is)
}

/// The answer of `name` for `text`; `None` if there is no such method.
pub(super) fn ask(text: &str, name: &str) -> Result<Option<bool>> {
    let numbers = matches!(name, "isdigit" | "isnumeric" | "isalnum");
    if numbers && text.chars().any(is_other_number) && !(name == "isalnum" && all(text, is_letter)) {
        return Err(Error::failed(format!("`{name}` of such numbers is not supported")));
    }
    Ok(Some(match name {
        "isalnum" => all(text, |c| is_letter(c) || decimal(c).is_some()),
        "isalpha" => all(text, is_letter),
        "isascii" => text.is_ascii(),
        "isdecimal" | "isdigit" | "isnumeric" => all(text, |c| decimal(c).is_some()),
        "isidentifier" => {
            if !text.is_ascii() {
                return Err(Error::failed("`isidentifier` of other letters than ASCII is not supported"));
            }
            let starts = text.starts_with(|c: char| c == '_' || c.is_ascii_alphabetic());
            starts && text.chars().all(|c| c == '_' || c.is_ascii_alphanumeric())
        }
        "islower" => is_lower(text),
        "isprintable" => text.chars().all(is_printable),
        "isspace" => all(text, is_space),
        "istitle" => is_titled(text),
        "isupper" => is_upper(text),
        _ => return Ok(None),
    }))
}
