//! One error type: a kind that callers can match on and a message with the numbers in it.

use std::fmt;
use std::sync::Arc;

/// A [`Result`](std::result::Result) whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, in the same words that the Python package uses for its exception classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A value or shape that no pool can take (`ConfigError`, a `ValueError`).
    Config,
    /// A type or dtype that does not fit (`TypeError`).
    Type,
    /// An index outside of what is indexed (`IndexError`).
    Index,
    /// An index that its giver does not own (`IndexOwnershipError`, a `ValueError`).
    IndexOwnership,
    /// Memory that the backend could not give (`OutOfMemoryError`, a `MemoryError`).
    OutOfMemory,
    /// An arena that is full (`WorkspaceExhaustedError`, a `MemoryError`).
    WorkspaceExhausted,
    /// A buffer used after it was given back (`StaleBufferError`, a `RuntimeError`).
    StaleBuffer,
    /// A driver call that failed (`DriverError`, a `RuntimeError`).
    Driver,
    /// A device that cannot be used here (`BackendUnavailableError`, a `RuntimeError`).
    BackendUnavailable,
    /// An object that is closed, or that another thread has (`RuntimeError`).
    State,
}

impl ErrorKind {
    /// Every kind, in the order of declaration.
    pub const ALL: [Self; 10] = [
        Self::Config,
        Self::Type,
        Self::Index,
        Self::IndexOwnership,
        Self::OutOfMemory,
        Self::WorkspaceExhausted,
        Self::StaleBuffer,
        Self::Driver,
        Self::BackendUnavailable,
        Self::State,
    ];

    /// The name of the Python exception class for this kind.
    ///
    /// ```
    /// use kvpool::base::ErrorKind;
    /// assert_eq!(ErrorKind::OutOfMemory.class_name(), "OutOfMemoryError");
    /// ```
    #[must_use]
    pub const fn class_name(self) -> &'static str {
        match self {
            Self::Config => "ConfigError",
            Self::Type => "TypeError",
            Self::Index => "IndexError",
            Self::IndexOwnership => "IndexOwnershipError",
            Self::OutOfMemory => "OutOfMemoryError",
            Self::WorkspaceExhausted => "WorkspaceExhaustedError",
            Self::StaleBuffer => "StaleBufferError",
            Self::Driver => "DriverError",
            Self::BackendUnavailable => "BackendUnavailableError",
            Self::State => "RuntimeError",
        }
    }
}

/// A failed call: its kind, and a message that carries the numbers (asked, available, index, capacity).
///
/// ```
/// use kvpool::base::{Error, ErrorKind};
/// let error = Error::index("row 9 is outside [0, 4)").at_index(9);
/// assert_eq!(error.kind(), ErrorKind::Index);
/// assert_eq!(error.to_string(), "row 9 is outside [0, 4)");
/// assert_eq!(error.facts().index, Some(9));
/// ```
#[derive(Clone, Debug)]
pub struct Error(Box<Inner>);

#[derive(Clone, Debug)]
struct Inner {
    kind: ErrorKind,
    message: String,
    facts: Facts,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// The numbers of an error, for programs; its message has them for people. `None` where there is no such number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The first index that was wrong.
    pub index: Option<i64>,
    /// Bytes or units that were asked for.
    pub asked: Option<usize>,
    /// Bytes or units that there were.
    pub available: Option<usize>,
    /// The code that the driver returned, a `CUresult`.
    pub code: Option<u32>,
}

impl Error {
    /// An error of `kind` that says `message`.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, message: message.into(), facts: Facts::default(), source: None }))
    }

    /// An error of the caller's own code, such as that of a fence, which a pool hands through.
    #[must_use]
    pub fn foreign(source: impl std::error::Error + Send + Sync + 'static) -> Self {
        let mut error = Self::new(ErrorKind::State, source.to_string());
        error.0.source = Some(Arc::new(source));
        error
    }

    /// The same, with `words` and a colon before its message.
    #[must_use]
    pub fn prefixed(mut self, words: &str) -> Self {
        self.0.message = format!("{words}: {}", self.0.message);
        self
    }

    /// The same, about `index`.
    #[must_use]
    pub fn at_index(mut self, index: impl Into<i64>) -> Self {
        self.0.facts.index = Some(index.into());
        self
    }

    /// The same, as so much was asked for.
    #[must_use]
    pub fn asked(mut self, asked: usize) -> Self {
        self.0.facts.asked = Some(asked);
        self
    }

    /// The same, as there was only so much.
    #[must_use]
    pub fn available(mut self, available: usize) -> Self {
        self.0.facts.available = Some(available);
        self
    }

    /// The same, as the driver returned `code`.
    #[must_use]
    pub fn with_code(mut self, code: u32) -> Self {
        self.0.facts.code = Some(code);
        self
    }

    /// A wrong value or shape.
    #[must_use]
    pub fn config(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config, message)
    }

    /// A wrong type or dtype.
    #[must_use]
    pub fn wrong_type(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Type, message)
    }

    /// An index outside of what is indexed.
    #[must_use]
    pub fn index(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Index, message)
    }

    /// What went wrong.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Its numbers.
    #[must_use]
    pub const fn facts(&self) -> Facts {
        self.0.facts
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

/// Of the same kind, with the same words.
impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        (self.0.kind, &self.0.message) == (other.0.kind, &other.0.message)
    }
}

impl Eq for Error {}
