//! A layout as a table of text.

use std::fmt;

use super::cache_layout::{CacheLayout, Group, GroupKind, Plane, Share};

const HEADINGS: [&str; 6] = ["group", "kind", "layers", "planes of an entry", "bytes a layer", "bytes"];

/// The columns of numbers, which end at one place.
const RIGHT: [bool; 6] = [false, false, true, false, true, true];

/// One line for each group, bytes of a token or of a state: in one layer, and in all.
impl fmt::Display for CacheLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<_> =
            [HEADINGS.map(str::to_owned)].into_iter().chain(self.groups().iter().map(row)).collect();
        let widths =
            [0, 1, 2, 3, 4, 5].map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0));
        if !self.model().is_empty() {
            write!(f, "{}, ", self.model())?;
        }
        writeln!(f, "pages of {} tokens", self.page_size())?;
        for row in &rows {
            for (column, (text, width)) in row.iter().zip(widths).enumerate() {
                let gap = if column > 0 { "  " } else { "" };
                if RIGHT[column] {
                    write!(f, "{gap}{text:>width$}")?;
                } else {
                    write!(f, "{gap}{text:width$}")?;
                }
            }
            writeln!(f)?;
        }
        let token: f64 = self.groups().iter().filter_map(Group::token_bytes).sum();
        let states: usize = self
            .groups()
            .iter()
            .filter(|group| group.kind() == GroupKind::State)
            .map(Group::all_layers)
            .sum();
        write!(f, "{} bytes a token, {} a request", number(token), grouped(states))
    }
}

fn row(group: &Group) -> [String; 6] {
    let planes: Vec<_> = group.planes().iter().map(Plane::to_string).collect();
    let Share { part, parts } = group.share();
    let share = if parts > 1 { format!(", part {part} of {parts}") } else { String::new() };
    let (layers, aliases) = (group.layers().len(), group.aliases().len());
    let layers = if aliases > 0 { format!("{layers} + {aliases} aliases") } else { layers.to_string() };
    let each = |bytes: usize| match group.stride() {
        1 => grouped(bytes),
        stride => format!("{} for {stride} tokens", grouped(bytes)),
    };
    [
        group.name().to_owned(),
        format!("{}{share}", group.kind()),
        layers,
        planes.join(" + "),
        each(group.entry_bytes()),
        each(group.all_layers()),
    ]
}

impl Group {
    /// Returns the bytes of an entry in all layers, which fit an address.
    fn all_layers(&self) -> usize {
        self.layers().len() * self.entry_bytes()
    }

    /// Returns the bytes of a token in all layers, or `None` for states.
    #[expect(clippy::cast_precision_loss, reason = "bytes of a token are below 2^52")]
    fn token_bytes(&self) -> Option<f64> {
        (self.kind() != GroupKind::State).then(|| self.all_layers() as f64 / self.stride() as f64)
    }
}

/// Formats a number with commas between thousands.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats bytes of a token, which are a fraction where an entry stands for several.
fn number(bytes: f64) -> String {
    let text = format!("{bytes:.2}");
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, "00"));
    let whole = whole.parse().map_or_else(|_| whole.to_owned(), grouped);
    if fraction == "00" { whole } else { format!("{whole}.{fraction}") }
}

#[cfg(test)]
mod tests {
    use crate::base::DType;
    use crate::layout::{CacheLayout, Group, GroupKind, Plane, Share};

    #[test]
    fn a_table_has_a_line_for_each_group() {
        let plane = |name, dtype, shape: &[usize]| Plane::new(name, dtype, shape).expect("valid");
        let window = GroupKind::Window { tokens: 128, sinks: 4 };
        let groups = vec![
            Group::new("window", window, &[0, 2], vec![plane("k", DType::BF16, &[8, 64])])
                .and_then(|group| group.with_aliases(&[(4, 2)]))
                .and_then(|group| group.with_share(Share { part: 1, parts: 2 }))
                .expect("valid"),
            Group::new("chain", GroupKind::Full, &[1], vec![plane("latent", DType::U8, &[583])])
                .and_then(|group| group.with_stride(4))
                .expect("valid"),
            Group::new("state", GroupKind::State, &[3], vec![plane("recurrent", DType::F32, &[1_000_000])])
                .expect("valid"),
        ];
        let layout = CacheLayout::new("a model", 16, groups).expect("valid");
        let lines: Vec<_> = "\
a model, pages of 16 tokens
group   kind                                layers         planes of an entry            bytes a layer             bytes
window  window(128) + 4 sinks, part 1 of 2  2 + 1 aliases  k bfloat16[8, 64]                     1,024             2,048
chain   full                                1              latent uint8[583]          583 for 4 tokens  583 for 4 tokens
state   state                               1              recurrent float32[1000000]        4,000,000         4,000,000
2,193.75 bytes a token, 4,000,000 a request"
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        let found: Vec<_> = layout
            .to_string()
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(found, lines);
    }
}
