//! Suggestions for misspelt names. Imports nothing of the crate.

/// Returns the candidate that is most similar to `got`, ignoring case and separators, if it is similar enough.
#[must_use]
pub fn closest<'c>(got: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let plain = |s: &str| s.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    // A name longer than all candidates is not a misspelling of one, and the comparison is quadratic.
    let got = plain(got.get(..64).unwrap_or(got));
    candidates
        .into_iter()
        .map(|c| (strsim::damerau_levenshtein(&got, &plain(c)), c))
        .filter(|(distance, c)| *distance <= (c.len() / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, c)| c)
}
