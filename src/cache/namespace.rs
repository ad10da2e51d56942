//! Namespaces, which keep the prefixes of different users apart.

use std::fmt;

/// The name of a set of prefixes, such as an adapter, a tenant or a model. Prefixes in different namespaces
/// share nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Namespace {
    /// No name.
    #[default]
    Unnamed,
    /// A number.
    Number(i64),
    /// A number of more than 64 bits, in decimal.
    Large(String),
    /// A text.
    Text(String),
    /// Bytes, such as a salt.
    Bytes(Vec<u8>),
}

impl Namespace {
    /// Returns the number of bytes that the name takes up on the heap.
    #[must_use]
    pub const fn text_bytes(&self) -> usize {
        match self {
            Self::Unnamed | Self::Number(_) => 0,
            Self::Large(text) | Self::Text(text) => text.capacity(),
            Self::Bytes(bytes) => bytes.capacity(),
        }
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unnamed => f.write_str("None"),
            Self::Number(number) => number.fmt(f),
            Self::Large(digits) => f.write_str(digits),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Bytes(bytes) => write!(f, "b\"{}\"", bytes.escape_ascii()),
        }
    }
}
