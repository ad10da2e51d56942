//! Settings from the environment of the process.

use pyo3::PyResult;

use crate::base::Error;

/// Returns the value of a variable; `None` if it is not set. What is not text is no value that anybody accepts.
fn value_of(variable: &str) -> Option<String> {
    std::env::var_os(variable).map(|value| value.to_string_lossy().into_owned())
}

/// Returns the number from `least` on that a variable is set to, or else the usual one.
pub(super) fn number_of(variable: &str, least: usize, usual: usize) -> PyResult<usize> {
    let Some(value) = value_of(variable) else { return Ok(usual) };
    match value.trim().parse() {
        Ok(number) if number >= least => Ok(number),
        _ => {
            Err(Error::config(format!("{variable} is {value:?}; it must be a number from {least} on")).into())
        }
    }
}

/// Returns whether a variable is set to one of `words`, in upper or lower case.
pub(super) fn is_one_of(variable: &str, words: &[&str]) -> bool {
    value_of(variable).is_some_and(|value| words.iter().any(|word| value.eq_ignore_ascii_case(word)))
}
