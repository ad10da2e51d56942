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
/// let error = Error::config("size is -1; it must be at least 1");
/// assert_eq!(error.kind(), ErrorKind::Config);
/// assert_eq!(error.to_string(), "size is -1; it must be at least 1");
/// ```
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error of `kind` that says `message`.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// An error of the caller's own code, such as that of a fence, which a pool hands through.
    #[must_use]
    pub fn foreign(source: impl std::error::Error + Send + Sync + 'static) -> Self {
        let message = source.to_string();
        Self { source: Some(Arc::new(source)), ..Self::new(ErrorKind::State, message) }
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
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// Of the same kind, with the same words.
impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        (self.kind, &self.message) == (other.kind, &other.message)
    }
}

impl Eq for Error {}
