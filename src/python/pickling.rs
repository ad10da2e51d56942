//! The error of pickling or copying an object of this module.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyType;

/// Raises a `TypeError` that says why there is no copy of `object`, in this process or another.
#[pyfunction]
pub(super) fn refuse(object: &Bound<'_, PyAny>) -> PyResult<()> {
    let class = object.get_type();
    Err(PyTypeError::new_err(format!(
        "{} cannot be pickled or copied: it stands for memory and bookkeeping of this process; copy the values \
         of its tensors, and construct a pool where one is needed",
        class.fully_qualified_name()?
    )))
}

/// Registers [`refuse`] for the classes of `module` with `copyreg`, which `pickle` and `copy` ask; not for plain values,
/// which say what they are made of.
pub(super) fn explain(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let register = py.import("copyreg")?.getattr("pickle")?;
    let refuse = wrap_pyfunction!(refuse, module)?;
    for thing in module.dict().values() {
        if let Ok(class) = thing.cast_into::<PyType>()
            && !["__getnewargs__", "__getnewargs_ex__"]
                .iter()
                .any(|name| class.hasattr(*name).unwrap_or(false))
        {
            register.call1((class, &refuse))?;
        }
    }
    Ok(())
}
