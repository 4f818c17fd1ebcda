//! What was probably meant by a misspelt name. Imports nothing of the crate.

/// The candidate that was probably meant by `got`: close in spelling, ignoring case and separators.
#[must_use]
pub fn closest<'c>(got: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let plain = |s: &str| s.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    // A name longer than any of ours can't be a misspelling of one, and comparing is quadratic.
    let got = plain(got.get(..64).unwrap_or(got));
    candidates
        .into_iter()
        .map(|c| (strsim::damerau_levenshtein(&got, &plain(c)), c))
        .filter(|(distance, c)| *distance <= (c.len() / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, c)| c)
}
