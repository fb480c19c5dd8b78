package io.penstock.example;

import java.io.IOException;

/** Standard output, where a failure is an exception. */
final class Output {
  private Output() {}

  /** Writes the text at once. */
  static void print(String text) throws IOException {
    System.out.print(text);
    if (System.out.checkError()) {
      throw new IOException("nobody reads the output");
    }
  }
}
