//! The elements of a `kvpool.Tensor` as Python numbers, nested lists and text.

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList, PySlice, PyTuple};

use crate::base::Error;
use crate::base::bounded::{distance, unsigned};
use crate::kernels::{Element, elements};
use crate::tensor::{DimIndex, TensorView};

use super::ints::{int, kind_of};

/// Elements that are shown of a dimension from each end, if not all are, in the last two dimensions.
const EDGE: usize = 3;

/// Converts the elements of a tensor in host memory to a number, or to nested lists of as many dimensions as
/// it has.
pub(super) fn to_list<'py>(py: Python<'py>, view: &TensorView) -> PyResult<Bound<'py, PyAny>> {
    let values = elements(&view.borrow())?;
    nested(py, view.shape().as_slice(), &mut values.into_iter())
}

fn nested<'py>(
    py: Python<'py>,
    shape: &[i64],
    values: &mut impl Iterator<Item = Element>,
) -> PyResult<Bound<'py, PyAny>> {
    match shape {
        [] => number(py, values.next().expect("there are as many as the shape says")),
        [extent, rest @ ..] => {
            let list = PyList::empty(py);
            for _ in 0..*extent {
                list.append(nested(py, rest, values)?)?;
            }
            Ok(list.into_any())
        }
    }
}

fn number(py: Python<'_>, element: Element) -> PyResult<Bound<'_, PyAny>> {
    match element {
        Element::Int(value) => value.into_bound_py_any(py),
        Element::Single(value) => f64::from(value).into_bound_py_any(py),
        Element::Double(value) => value.into_bound_py_any(py),
        Element::Bool(value) => value.into_bound_py_any(py),
    }
}

/// Formats the elements of a tensor in host memory; of a long dimension only the first and the last ones.
pub(super) fn format_tensor(view: &TensorView) -> crate::base::Result<String> {
    let shape = view.shape().as_slice();
    let Some(&extent) = shape.first() else {
        return Ok(elements(&view.borrow())?.into_iter().map(format_element).collect());
    };
    let (extent, edge) = (unsigned(extent), if shape.len() > 2 { 1 } else { EDGE });
    let row = |index| format_tensor(&view.select(&[DimIndex { start: index, count: None, step: 1 }])?);
    let is_long = extent > 2 * EDGE;
    let (first, last) = if is_long { (0..edge, extent - edge..extent) } else { (0..extent, extent..extent) };
    let mut parts = first.map(row).collect::<crate::base::Result<Vec<_>>>()?;
    if is_long {
        parts.push("...".to_owned());
    }
    for index in last {
        parts.push(row(index)?);
    }
    Ok(format!("[{}]", parts.join(", ")))
}

fn format_element(element: Element) -> String {
    let text = match element {
        Element::Int(value) => format!("{value}"),
        Element::Single(value) => format!("{value:?}"),
        Element::Double(value) => format!("{value:?}"),
        Element::Bool(value) => if value { "True" } else { "False" }.to_owned(),
    };
    if text == "NaN" { "nan".to_owned() } else { text }
}

/// Returns the part of a tensor that an index of Python selects: an int or a slice, or a tuple of them.
pub(super) fn part_of(view: &TensorView, index: &Bound<'_, PyAny>) -> PyResult<TensorView> {
    let Ok(tuple) = index.cast::<PyTuple>() else {
        return part_of(view, PyTuple::new(index.py(), [index])?.as_any());
    };
    view.check_dimensions(tuple.len())?;
    let extents = view.shape().as_slice();
    let picks = tuple.iter().zip(extents).map(|(index, &extent)| select(&index, extent));
    Ok(view.select(&picks.collect::<PyResult<Vec<_>>>()?)?)
}

fn select(index: &Bound<'_, PyAny>, extent: i64) -> PyResult<DimIndex> {
    if let Ok(slice) = index.cast::<PySlice>() {
        let chosen = slice.indices(distance(extent))?;
        let Ok(step) = usize::try_from(chosen.step) else {
            return Err(Error::argument(format!(
                "the step of a slice is {}; it must be positive: numpy() takes others",
                chosen.step
            ))
            .into());
        };
        let start = usize::try_from(chosen.start).expect("it is within the dimension");
        return Ok(DimIndex { start, count: Some(chosen.slicelength), step });
    }
    let is_int = !index.is_instance_of::<PyBool>() && index.hasattr("__index__")?;
    if !is_int {
        return Err(PyTypeError::new_err(format!(
            "a tensor is indexed with ints and slices, not {}; numpy() takes others",
            kind_of(index)
        )));
    }
    let given = int(index)?;
    let from_start = if given < 0 { given.saturating_add(extent) } else { given };
    if !(0..extent).contains(&from_start) {
        let text = format!("index {given} is outside [{}, {extent})", -extent);
        return Err(Error::index(text).with_index(given).into());
    }
    Ok(DimIndex { start: unsigned(from_start), count: None, step: 1 })
}
