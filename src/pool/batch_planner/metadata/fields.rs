//! The arrays of a plan.

use std::sync::Arc;

use crate::base::{DType, Error, ErrorKind, Id, IndexVec, RequestRow, Result, try_with_capacity};
use crate::index::Requests;
use crate::memory::Region;
use crate::pool::batch_planner::{Field, Plan};
use crate::tensor::TensorView;

use super::PlanMetadata;

impl PlanMetadata {
    /// Returns an array of a plan. In host memory it is written now if nobody has asked for it before, and by each
    /// later plan.
    pub(in crate::pool::batch_planner) fn field(
        &mut self,
        plan: &Plan,
        field: Field,
    ) -> Result<Option<TensorView>> {
        self.check_current(plan, plan.number == self.plans)?;
        if self.host_fields.is_none() {
            self.small_fields.ask(field, &mut self.fields, &self.layout)?;
        }
        self.layout.view(self.fields.region(), plan, field)
    }

    /// `requests` are those of the planner, with the pages that the plan lists.
    pub(in crate::pool::batch_planner) fn host_field(
        &mut self,
        requests: &Requests,
        plan: &Plan,
        field: Field,
    ) -> Result<Option<TensorView>> {
        self.check_current(plan, plan.number == self.plans)?;
        let host_fields = self.host_fields.as_mut().unwrap_or(&mut self.fields);
        self.small_fields.ask(field, host_fields, &self.layout)?;
        let Some(host_fields) = &self.host_fields else {
            return self.layout.view(self.fields.region(), plan, field);
        };
        let width = match field {
            Field::KvIndices | Field::BlockTable if !self.layout.has(field) => return Ok(None),
            Field::KvIndices => None,
            Field::BlockTable => Some(self.layout.width()),
            _ => return self.layout.view(host_fields.region(), plan, field),
        };
        self.check_current(plan, plan.changes == self.changes)?;
        let mut values: Vec<i32> =
            try_with_capacity(width.map_or(plan.kv_len, |width| plan.padded_batch_size * width))?;
        for batch_index in 0..plan.padded_batch_size {
            if batch_index < plan.batch_size {
                let row = RequestRow::new(self.small_fields.req_pool_indices[batch_index].cast_unsigned());
                let pages = requests.pages(row);
                // A row that was freed and taken again belongs to another request.
                self.check_current(plan, pages.len() == self.small_fields.kv_pages(batch_index))?;
                values.extend(pages.iter_from(0).map(|page| page.number().cast_signed()));
            } else {
                values.resize(values.len() + self.small_fields.kv_pages(batch_index), 0);
            }
            if let Some(width) = width {
                values.resize((batch_index + 1) * width, 0);
            }
        }
        let shape = width.map_or(vec![plan.kv_len], |width| vec![plan.padded_batch_size, width]);
        let region = Arc::new(Region::from_indices(IndexVec::I32(values)));
        TensorView::contiguous(region, 0, DType::I32, &shape).map(Some)
    }

    fn check_current(&self, plan: &Plan, is_current: bool) -> Result<()> {
        if is_current {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Stale,
            format!(
                "plan {} is not the last any more: its arrays were overwritten by plan {}, or its requests have \
                 changed; take them before",
                plan.number, self.plans
            ),
        ))
    }
}
