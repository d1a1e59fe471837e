//! Numbers in JSON that come back to the bit: for `#[serde(with = "exact")]` on what is compared after it was saved.
//!
//! They are written as text. JSON's own numbers are read back with an error of a unit in the last place now and then.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What is written as text.
pub trait Exact: Sized {
    /// As text.
    type Text: Serialize;
    /// As text, or as JSON's own numbers.
    type Read: for<'de> Deserialize<'de>;

    /// The numbers as text.
    fn text(&self) -> Self::Text;

    /// Those that were read.
    ///
    /// # Errors
    /// The text that is no number.
    fn read(read: Self::Read) -> Result<Self, String>;
}

/// A number that was read.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum Number {
    /// As text.
    Text(String),
    /// As JSON has it.
    Plain(f64),
}

impl Exact for f64 {
    type Text = String;
    type Read = Number;

    fn text(&self) -> String {
        self.to_string()
    }

    fn read(read: Number) -> Result<f64, String> {
        match read {
            Number::Text(text) => text.parse().map_err(|_| format!("'{text}' is no number")),
            Number::Plain(number) => Ok(number),
        }
    }
}

impl Exact for Vec<f64> {
    type Text = Vec<String>;
    type Read = Vec<Number>;

    fn text(&self) -> Vec<String> {
        self.iter().map(f64::text).collect()
    }

    fn read(read: Vec<Number>) -> Result<Vec<f64>, String> {
        read.into_iter().map(f64::read).collect()
    }
}

/// For serde.
///
/// # Errors
/// The serializer's.
pub fn serialize<T: Exact, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    value.text().serialize(serializer)
}

/// For serde.
///
/// # Errors
/// The deserializer's, and where there is no number.
pub fn deserialize<'de, T: Exact, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    T::read(T::Read::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}
