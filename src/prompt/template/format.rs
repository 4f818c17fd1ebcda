//! Analysis of a template's source: whether it expects the text of a message whole or in parts.
//!
//! vLLM searches the syntax tree for a loop over `message.content`, where `message` comes from a loop over
//! `messages` or over a variable that was set from it; filters, tests and slices are ignored. The same is found here
//! in the tokens of the tags.

use std::collections::BTreeSet;

/// The form in which a template expects the text of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// One string, with parts joined by newlines.
    Text,
    /// A list of `{"type": "text", "text": …}`.
    Parts,
}

impl ContentFormat {
    /// Returns the form that the template `source` expects.
    pub(super) fn detect(source: &str) -> Self {
        let (mut sets, mut loops) = (Vec::new(), Vec::new());
        for tag in tags(source) {
            match tokens(tag.body).as_slice() {
                [Token::Name("set"), Token::Name(target), Token::Mark('='), rest @ ..] => {
                    sets.extend(Access::whole(rest).map(|a| (*target, a)));
                }
                [Token::Name("for"), Token::Name(target), Token::Name("in"), rest @ ..] => {
                    loops.extend(Access::of_loop(rest).map(|a| (*target, a)));
                }
                _ => {}
            }
        }
        let mut lists = BTreeSet::from(["messages"]);
        // Each round finds at least one more variable or is the last.
        while sets.iter().any(|(target, a)| a.is(&lists, None) && lists.insert(target)) {}
        let messages: BTreeSet<&str> = loops.iter().filter(|(_, a)| a.is(&lists, None)).map(|(t, _)| *t).collect();
        if loops.iter().any(|(_, a)| a.is(&messages, Some("content"))) { Self::Parts } else { Self::Text }
    }
}

/// A `{% … %}` tag of a template.
#[derive(Clone, Debug)]
struct Tag<'a> {
    /// The text between the percent signs.
    body: &'a str,
}

/// Returns all tags of a template; comments, expressions and raw blocks are skipped.
fn tags(source: &str) -> Vec<Tag<'_>> {
    let mut out = Vec::new();
    let (mut at, mut raw) = (0, false);
    while let Some(rest) = source.get(at..) {
        let Some(open) = rest.find('{').map(|i| at + i) else { break };
        let inner = open + 2;
        let (close, quotes) = match source.as_bytes().get(open + 1) {
            Some(b'%') => ("%}", true),
            Some(b'#') if !raw => ("#}", false),
            Some(b'{') if !raw => ("}}", true),
            _ => {
                at = open + 1;
                continue;
            }
        };
        let Some(length) = source.get(inner..).and_then(|s| closing(s, close, quotes && !raw)) else { break };
        let range = inner..inner + length;
        at = range.end + 2;
        if close == "%}" {
            let body = source.get(range).unwrap_or_default();
            match body.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+')) {
                "raw" => raw = true,
                "endraw" => raw = false,
                // Inside a raw block, only its end is a tag.
                _ if raw => at = inner,
                _ => out.push(Tag { body }),
            }
        }
    }
    out
}

/// Returns the position of `close` in `text`, outside of quoted strings.
fn closing(text: &str, close: &str, quotes: bool) -> Option<usize> {
    let bytes = text.as_bytes();
    let mut quote: Option<u8> = None;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match quote {
            Some(_) if byte == b'\\' => at += 1,
            Some(q) if byte == q => quote = None,
            Some(_) => {}
            None if quotes && matches!(byte, b'"' | b'\'') => quote = Some(byte),
            None if bytes.get(at..).is_some_and(|b| b.starts_with(close.as_bytes())) => return Some(at),
            None => {}
        }
        at += 1;
    }
    None
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    Name(&'a str),
    Text(&'a str),
    Mark(char),
}

/// Returns the tokens of a tag's body; numbers count as names.
fn tokens(body: &str) -> Vec<Token<'_>> {
    let mut out = Vec::new();
    let mut rest = body.strip_prefix(['-', '+']).unwrap_or(body);
    rest = rest.strip_suffix(['-', '+']).unwrap_or(rest).trim_start();
    while let Some(first) = rest.chars().next() {
        let used = if first == '"' || first == '\'' {
            let inner = rest.get(1..).unwrap_or_default();
            let length = closing(inner, rest.get(..1).unwrap_or_default(), false).unwrap_or(inner.len());
            out.push(Token::Text(inner.get(..length).unwrap_or_default()));
            length + 2
        } else if first == '_' || first.is_alphanumeric() {
            let length = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
            out.push(Token::Name(rest.get(..length).unwrap_or_default()));
            length
        } else {
            out.push(Token::Mark(first));
            first.len_utf8()
        };
        rest = rest.get(used..).unwrap_or_default().trim_start();
    }
    out
}

/// A variable or one attribute of it, followed by any filters, tests and slices.
#[derive(Clone, Copy, Debug)]
struct Access<'a> {
    name: &'a str,
    key: Option<&'a str>,
}

impl<'a> Access<'a> {
    /// Parses `tokens` as an access, if they are nothing else.
    fn whole(tokens: &[Token<'a>]) -> Option<Self> {
        let (access, rest) = Self::parse(tokens)?;
        rest.is_empty().then_some(access)
    }

    /// Parses the access that a loop iterates over; a condition or `recursive` may follow.
    fn of_loop(tokens: &[Token<'a>]) -> Option<Self> {
        let (access, rest) = Self::parse(tokens)?;
        matches!(rest, [] | [Token::Name("if" | "recursive"), ..]).then_some(access)
    }

    fn parse<'t>(tokens: &'t [Token<'a>]) -> Option<(Self, &'t [Token<'a>])> {
        let [Token::Name(name), rest @ ..] = tokens else { return None };
        let (key, mut rest) = match rest {
            [Token::Mark('.'), Token::Name(key), rest @ ..]
            | [Token::Mark('['), Token::Text(key), Token::Mark(']'), rest @ ..] => (Some(*key), rest),
            _ => (None, rest),
        };
        loop {
            rest = match rest {
                [Token::Mark('['), inside @ ..] => {
                    let end = balanced(inside, '[', ']')?;
                    inside.get(..end)?.contains(&Token::Mark(':')).then_some(())?;
                    inside.get(end + 1..)?
                }
                [Token::Mark('|'), Token::Name(_), rest @ ..]
                | [Token::Name("is"), Token::Name("not"), Token::Name(_), rest @ ..]
                | [Token::Name("is"), Token::Name(_), rest @ ..] => match rest {
                    [Token::Mark('('), inside @ ..] => inside.get(balanced(inside, '(', ')')? + 1..)?,
                    _ => rest,
                },
                _ => return Some((Self { name, key }, rest)),
            };
        }
    }

    fn is(&self, names: &BTreeSet<&str>, key: Option<&str>) -> bool {
        self.key == key && names.contains(self.name)
    }
}

/// Returns the position of the bracket that closes the one opened before `tokens`.
fn balanced(tokens: &[Token<'_>], open: char, close: char) -> Option<usize> {
    let mut depth = 0usize;
    for (i, token) in tokens.iter().enumerate() {
        match token {
            Token::Mark(c) if *c == open => depth += 1,
            Token::Mark(c) if *c == close => match depth.checked_sub(1) {
                None => return Some(i),
                Some(d) => depth = d,
            },
            _ => {}
        }
    }
    None
}
