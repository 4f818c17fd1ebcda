//! Suggestions for misspelt names. Imports nothing of the crate.

/// Returns the candidate that is most similar to `got`, ignoring case and separators, if it is similar enough. It is
/// never `got` itself, which may be among the candidates where a known name is not allowed.
#[must_use]
pub fn closest<'c>(got: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    let plain = |s: &str| s.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    // A name longer than all candidates is not a misspelling of one, and the comparison is quadratic.
    let name = plain(got.get(..64).unwrap_or(got));
    candidates
        .into_iter()
        .filter(|c| *c != got)
        .map(|c| (strsim::damerau_levenshtein(&name, &plain(c)), c))
        .filter(|(distance, c)| *distance <= (c.len() / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, c)| c)
}

#[cfg(test)]
mod tests {
    use super::closest;

    #[test]
    fn misspelt_names_are_corrected_and_never_suggested_themselves() {
        let known = ["queue-scorer", "workPrice", "queu-scorer"];
        assert_eq!(closest("queu-scorer", known), Some("queue-scorer"));
        assert_eq!(closest("work_price", known), Some("workPrice"));
        assert_eq!(closest("workPrice", ["workPrice"]), None);
        assert_eq!(closest("entirely-other", known), None);
    }
}
