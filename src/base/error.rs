//! The error type. An error has a kind to match on, a message, and its numbers for programs.

use std::fmt;
use std::sync::Arc;

/// A [`Result`](std::result::Result) whose error is [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// The category of an error. Each kind corresponds to one exception class of the Python package.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An invalid value or shape in the construction of an object (`ConfigError`, a `ValueError`).
    Config,
    /// An invalid value or shape in another call (`ArgumentError`, a `ConfigError`).
    Argument,
    /// An invalid type or dtype (`TypeError`).
    Type,
    /// An index out of bounds (`IndexError`).
    Index,
    /// An index that the caller does not own (`IndexOwnershipError`, a `ValueError`).
    IndexOwnership,
    /// An allocation that the backend could not serve (`OutOfMemoryError`, a `MemoryError`).
    OutOfMemory,
    /// A full arena (`WorkspaceExhaustedError`, a `MemoryError`).
    WorkspaceExhausted,
    /// A buffer, lease or node that was freed or cleared (`StaleError`, a `RuntimeError`).
    Stale,
    /// A failed driver call (`DriverError`, a `RuntimeError`).
    Driver,
    /// A device that is not available (`BackendUnavailableError`, a `RuntimeError`).
    BackendUnavailable,
    /// A call that the state of an object does not allow: it is closed, in use by another thread, or has not begun
    /// (`StateError`, a `RuntimeError`).
    State,
}

impl ErrorKind {
    /// Every kind, in the order of declaration.
    pub const ALL: [Self; 11] = [
        Self::Config,
        Self::Argument,
        Self::Type,
        Self::Index,
        Self::IndexOwnership,
        Self::OutOfMemory,
        Self::WorkspaceExhausted,
        Self::Stale,
        Self::Driver,
        Self::BackendUnavailable,
        Self::State,
    ];
}

/// A failed call: its kind, and a message that contains the numbers (requested, available, index, capacity).
///
/// ```
/// use kvpool::base::{Error, ErrorKind};
/// let error = Error::index("row 9 is outside [0, 4)").with_index(9);
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

/// The numbers of an error, for programs; the message repeats them for people. `None` where a number does not
/// apply.
///
/// ```
/// use kvpool::base::{Error, Facts};
/// let error = Error::state("3 slots were asked for, 2 are free").with_asked(3).with_available(2);
/// let Facts { asked, available, index, .. } = error.facts();
/// assert_eq!((asked, available, index), (Some(3), Some(2), None));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The first invalid index.
    pub index: Option<i64>,
    /// Bytes or units requested.
    pub asked: Option<usize>,
    /// Bytes or units available.
    pub available: Option<usize>,
    /// The `CUresult` of the failed driver call.
    pub code: Option<u32>,
}

impl Error {
    /// Creates an error of `kind` with `message`.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, message: message.into(), facts: Facts::default(), source: None }))
    }

    /// Wraps an error from the caller's own code, such as a fence, so that a pool can return it.
    #[must_use]
    pub fn foreign(source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::new(ErrorKind::State, source.to_string()).with_source(source)
    }

    /// Returns whether this is an error of the caller's own code: see [`Error::foreign`].
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        self.0.kind == ErrorKind::State && self.0.source.is_some()
    }

    /// Sets the error that caused this one; the message names it.
    #[must_use]
    pub fn with_source(mut self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Puts `prefix` and a colon before the message.
    #[must_use]
    pub fn with_prefix(mut self, prefix: &str) -> Self {
        self.0.message = format!("{prefix}: {}", self.0.message);
        self
    }

    /// Sets [`Facts::index`].
    #[must_use]
    pub fn with_index(mut self, index: impl Into<i64>) -> Self {
        self.0.facts.index = Some(index.into());
        self
    }

    /// Sets [`Facts::asked`].
    #[must_use]
    pub fn with_asked(mut self, asked: usize) -> Self {
        self.0.facts.asked = Some(asked);
        self
    }

    /// Sets [`Facts::available`].
    #[must_use]
    pub fn with_available(mut self, available: usize) -> Self {
        self.0.facts.available = Some(available);
        self
    }

    /// Sets [`Facts::code`].
    #[must_use]
    pub fn with_code(mut self, code: u32) -> Self {
        self.0.facts.code = Some(code);
        self
    }

    /// Creates an [`ErrorKind::Config`] error.
    #[must_use]
    pub fn config(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config, message)
    }

    /// Creates an [`ErrorKind::Argument`] error.
    #[must_use]
    pub fn argument(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Argument, message)
    }

    /// Creates an [`ErrorKind::State`] error.
    #[must_use]
    pub fn state(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::State, message)
    }

    /// Creates an [`ErrorKind::Stale`] error.
    #[must_use]
    pub fn stale(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Stale, message)
    }

    /// Creates an [`ErrorKind::Type`] error.
    #[must_use]
    pub fn wrong_type(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Type, message)
    }

    /// Creates an [`ErrorKind::Index`] error.
    #[must_use]
    pub fn index(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Index, message)
    }

    /// Returns the category of this error.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the numbers of this error.
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

/// Errors are equal when their kinds and messages are.
impl PartialEq for Error {
    fn eq(&self, other: &Self) -> bool {
        (self.0.kind, &self.0.message) == (other.0.kind, &other.0.message)
    }
}

impl Eq for Error {}
